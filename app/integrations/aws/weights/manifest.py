"""The manifest of a model's files: what a reader may fetch, and how it knows that it is right.

It comes from outside, so everything in it is checked: names that leave the folder, files that
could run code when they are loaded, sizes that no model has.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from app.integrations.aws.weights.errors import WeightsError

MANIFEST_NAME: Final = "snapkv-manifest.json"
MAX_MANIFEST_BYTES: Final = 16 << 20
#: Short enough to be fetched again at little cost, long enough for a request's latency not to
#: count.
PART_BYTES: Final = 16 << 20

MAX_FILES: Final = 10_000
MAX_FILE_BYTES: Final = 1 << 40
MAX_TOTAL_BYTES: Final = 1 << 42
_MAX_NAME_CHARS: Final = 255
_MAX_DEPTH: Final = 4
_MIN_PART_BYTES: Final = 1 << 16
_MAX_PART_BYTES: Final = 1 << 30

WEIGHTS_SUFFIX: Final = ".safetensors"
#: Weights without code, and the text around them. Pickled formats, Python files and whatever else
#: could run something are refused by not being named.
_SUFFIXES: Final = (WEIGHTS_SUFFIX, ".json", ".jinja", ".md", ".model", ".tiktoken", ".txt")
_BARE_NAMES: Final = frozenset({"LICENSE", "NOTICE", "README"})
#: No hidden files, no `..`, nothing that a shell or a URL would read otherwise.
_COMPONENT: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=-]*")

_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def refusal_of(name: str) -> str | None:
    """Return why a file may not be part of a model, or None.

    Args:
        name: Its path in the model's folder, parts separated by `/`.
    """
    components = name.split("/")
    if (
        len(name) > _MAX_NAME_CHARS
        or len(components) > _MAX_DEPTH
        or not all(_COMPONENT.fullmatch(component) for component in components)
    ):
        return "is no plain relative file name"
    if name == MANIFEST_NAME:
        return "is the manifest itself"
    if components[-1] not in _BARE_NAMES and not name.lower().endswith(_SUFFIXES):
        return (
            "is no file of a model with safetensors weights; pickled formats and code are "
            f"refused, only {', '.join(_SUFFIXES)} are taken"
        )
    return None


class ManifestFile(BaseModel):
    """One file of a model.

    Attributes:
        name: Path in the model's folder, parts separated by `/`.
        size: Its length in bytes.
        sha256: Hash of all of it.
        parts: Hashes of its parts of `Manifest.part_size` bytes, the last of which may be shorter.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str
    size: int = Field(ge=0, le=MAX_FILE_BYTES)
    sha256: _Sha256
    parts: tuple[_Sha256, ...]

    @field_validator("name")
    @classmethod
    def _refuse_unsafe(cls, name: str) -> str:
        reason = refusal_of(name)
        if reason is not None:
            raise ValueError(f"{name[:_MAX_NAME_CHARS]!r} {reason}")
        return name


class Manifest(BaseModel):
    """All files of a model, in the order of their names.

    Attributes:
        version: Version of this format.
        part_size: Bytes that are fetched and checked at once.
        files: The files.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    version: Literal[1]
    part_size: int = Field(ge=_MIN_PART_BYTES, le=_MAX_PART_BYTES)
    files: tuple[ManifestFile, ...] = Field(min_length=1, max_length=MAX_FILES)

    @field_validator("files")
    @classmethod
    def _sort(cls, files: tuple[ManifestFile, ...]) -> tuple[ManifestFile, ...]:
        return tuple(sorted(files, key=lambda file: file.name))

    @model_validator(mode="after")
    def _check_together(self) -> "Manifest":
        _refuse_clashes([file.name for file in self.files])
        for file in self.files:
            if len(file.parts) != -(-file.size // self.part_size):
                raise ValueError(f"{file.name!r} has another number of parts than its size asks")
        if self.total_bytes > MAX_TOTAL_BYTES:
            raise ValueError(f"the files have {self.total_bytes} bytes, more than any model")
        if not any(file.name.lower().endswith(WEIGHTS_SUFFIX) for file in self.files):
            raise ValueError(f"there is no {WEIGHTS_SUFFIX} file")
        return self

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def canonical(self) -> bytes:
        """The one way to write this manifest: sorted keys and files, no spaces."""
        text = json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":"))
        return text.encode("ascii")

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical bytes: it names these weights and no others."""
        return hashlib.sha256(self.canonical).hexdigest()


def parse_manifest(raw: bytes, source: str) -> Manifest:
    """Read and check a manifest.

    Args:
        raw: Its bytes.
        source: Where they come from, for the message.

    Raises:
        WeightsError: It is no manifest, or names something that must not be fetched.
    """
    if len(raw) > MAX_MANIFEST_BYTES:
        raise WeightsError(f"{source}: is larger than {MAX_MANIFEST_BYTES} bytes")
    try:
        return Manifest.model_validate_json(raw)
    except ValidationError as error:
        raise WeightsError(f"{source}: {_first_problem(error)}") from None


def make_manifest(files: Sequence[Mapping[str, Any]], part_size: int, source: str) -> Manifest:
    """Check files that were hashed here, and make their manifest.

    Raises:
        WeightsError: Together they are no model that may be stored.
    """
    try:
        checked = tuple(ManifestFile(**file) for file in files)
        return Manifest(version=1, part_size=part_size, files=checked)
    except ValidationError as error:
        raise WeightsError(f"{source}: {_first_problem(error)}") from None


def _first_problem(error: ValidationError) -> str:
    detail = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, detail["loc"]))
    reason = detail["msg"].removeprefix("Value error, ")
    return f"{where}: {reason}" if where else reason


def _refuse_clashes(names: Sequence[str]) -> None:
    """Refuse names that are one on some file systems, and files that others use as a folder."""
    folded = [name.casefold() for name in names]
    taken = set(folded)
    if len(taken) != len(folded):
        (twice, *_) = (name for name in names if folded.count(name.casefold()) > 1)
        raise ValueError(f"{twice!r} is named twice")
    for name in folded:
        parents = name.split("/")[:-1]
        for depth in range(1, len(parents) + 1):
            if "/".join(parents[:depth]) in taken:
                raise ValueError(f"{name!r} lies in a folder that is also a file")
