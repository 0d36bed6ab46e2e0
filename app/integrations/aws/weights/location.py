"""A folder in S3, as `s3://bucket/prefix` names it."""

import re
from dataclasses import dataclass
from typing import Final

from snapkv_core import InvalidParameterError

SCHEME: Final = "s3://"
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_MAX_PREFIX_CHARS: Final = 700  # a key holds 1,024 bytes, the file's name included


def is_s3_url(model: str) -> bool:
    """Tell whether a model is named by a place in S3."""
    return model.startswith(SCHEME)


@dataclass(frozen=True, slots=True)
class S3Location:
    """Bucket and prefix of one model.

    Attributes:
        bucket: Name of the bucket.
        prefix: What the keys of the model's files begin with, without slashes at its ends; empty
            for a model at the top of its bucket.
    """

    bucket: str
    prefix: str

    @classmethod
    def parse(cls, url: str) -> "S3Location":
        """Take a URL apart.

        Raises:
            InvalidParameterError: It is not of the form `s3://bucket/prefix`.
        """
        if not is_s3_url(url):
            raise InvalidParameterError("url", f"must be s3://bucket/prefix, got {url[:200]!r}")
        bucket, _, prefix = url.removeprefix(SCHEME).partition("/")
        prefix = prefix.removesuffix("/")
        if not _BUCKET.fullmatch(bucket):
            raise InvalidParameterError("url", f"names no acceptable bucket: {url[:200]!r}")
        parts = prefix.split("/") if prefix else []
        is_clean = all(part not in ("", ".", "..") and part.isprintable() for part in parts)
        if not is_clean or len(prefix.encode(errors="replace")) > _MAX_PREFIX_CHARS:
            raise InvalidParameterError("url", f"has no acceptable prefix: {url[:200]!r}")
        return cls(bucket, prefix)

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.prefix}" if self.prefix else SCHEME + self.bucket

    @property
    def model_name(self) -> str:
        """Name under which the model is served unless another is set."""
        return (self.prefix or self.bucket).rpartition("/")[2]

    def key_of(self, name: str) -> str:
        """Return the key of one of its files."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def url_of(self, name: str) -> str:
        """Return the URL of one of its files, for messages."""
        return f"{SCHEME}{self.bucket}/{self.key_of(name)}"
