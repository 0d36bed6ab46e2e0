"""Stores a local model in S3 so that whoever sees its manifest finds every file of it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from boto3.s3.transfer import TransferConfig

from app.integrations.aws.s3_client import describe_failure, is_missing
from app.integrations.aws.weights.errors import WeightsError
from app.integrations.aws.weights.folder import (
    Listing,
    build_manifest,
    ignore_bytes,
    list_model_files,
)
from app.integrations.aws.weights.location import S3Location
from app.integrations.aws.weights.manifest import (
    MANIFEST_NAME,
    PART_BYTES,
    Manifest,
    ManifestFile,
)

MAX_PARALLEL: Final = 8
#: Metadata of an object: the SHA-256 of its content, as hex digits.
_SHA256: Final = "sha256"


@dataclass(frozen=True, slots=True)
class PushPlan:
    """What storing a folder takes.

    Attributes:
        manifest: Manifest of the folder.
        listing: Files of the folder as they were hashed.
        uploads: Files that are missing in S3 or differ there.
        has_manifest: Whether the same manifest is there already.
        has_other_manifest: Whether another one is there.
    """

    manifest: Manifest
    listing: Listing
    uploads: tuple[ManifestFile, ...]
    has_manifest: bool
    has_other_manifest: bool

    @property
    def upload_bytes(self) -> int:
        """Bytes that have to go over the network."""
        return sum(file.size for file in self.uploads)


class Pusher:
    """Stores one folder at one location."""

    def __init__(self, client: Any, folder: Path, location: S3Location) -> None:
        self._client = client
        self._folder = folder
        self._location = location

    def plan(
        self, *, part_size: int = PART_BYTES, on_bytes: Callable[[int], None] = ignore_bytes
    ) -> PushPlan:
        """Hash the folder and ask S3 what it has; changes nothing.

        Args:
            part_size: Bytes that readers will fetch and check at once.
            on_bytes: Told how many more bytes were hashed.

        Raises:
            WeightsError: The folder is no model that may be stored, or S3 fails.
        """
        listing = list_model_files(self._folder)
        manifest = build_manifest(self._folder, part_size=part_size, on_bytes=on_bytes)
        stored = self._stored_sha256(MANIFEST_NAME)
        return PushPlan(
            manifest=manifest,
            listing=listing,
            uploads=tuple(file for file in manifest.files if not self._is_stored(file)),
            has_manifest=stored == manifest.fingerprint,
            has_other_manifest=stored not in (None, manifest.fingerprint),
        )

    def push(self, plan: PushPlan, on_bytes: Callable[[int], None] = ignore_bytes) -> None:
        """Do what was planned.

        Args:
            plan: What `plan` returned.
            on_bytes: Told how many more bytes were sent; may be called on several threads.

        Raises:
            WeightsError: A file changed since it was hashed, or S3 fails; no manifest is there
                then that names what is not.
        """
        if plan.uploads and plan.has_other_manifest:
            # It names files that are about to change.
            self._call(MANIFEST_NAME, self._client.delete_object)
        for file in plan.uploads:
            self._upload(file, on_bytes)
        if list_model_files(self._folder) != plan.listing:
            raise WeightsError(f"{self._folder}: changed while it was pushed; push it again")
        if not plan.has_manifest:
            self._call(
                MANIFEST_NAME,
                self._client.put_object,
                Body=plan.manifest.canonical,
                ContentType="application/json",
                Metadata={_SHA256: plan.manifest.fingerprint},
            )

    def _upload(self, file: ManifestFile, on_bytes: Callable[[int], None]) -> None:
        self._call(
            file.name,
            self._client.upload_file,
            Filename=str(self._folder / file.name),
            ExtraArgs={"Metadata": {_SHA256: file.sha256}},
            Callback=on_bytes,
            Config=TransferConfig(multipart_chunksize=PART_BYTES, max_concurrency=MAX_PARALLEL),
        )

    def _is_stored(self, file: ManifestFile) -> bool:
        return self._stored_sha256(file.name, size=file.size) == file.sha256

    def _stored_sha256(self, name: str, size: int | None = None) -> str | None:
        """Return what an object's metadata says of its content; None when it is not there."""
        try:
            answer = self._client.head_object(
                Bucket=self._location.bucket, Key=self._location.key_of(name)
            )
        except Exception as error:
            if is_missing(error):
                return None
            raise self._failed(name, error) from error
        if size is not None and answer.get("ContentLength") != size:
            return None
        return str(answer.get("Metadata", {}).get(_SHA256, "unknown"))

    def _call(self, name: str, operation: Callable[..., object], **arguments: object) -> None:
        try:
            operation(Bucket=self._location.bucket, Key=self._location.key_of(name), **arguments)
        except Exception as error:
            # Not the SDK's own errors alone: on an answer that is no S3's it raises anything.
            raise self._failed(name, error) from error

    def _failed(self, name: str, error: Exception) -> WeightsError:
        return WeightsError(f"{self._location.url_of(name)}: {describe_failure(error)}")
