"""Brings a model from S3 to this machine: into the shared cache, or into a folder of one's own."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
from botocore.exceptions import BotoCoreError

from app.integrations.aws.s3_client import create_s3_client
from app.integrations.aws.weights.cache import PARTIAL_SUFFIX, HeldWeights, WeightsCache
from app.integrations.aws.weights.download import DownloadLimits, download_files, fetch_manifest
from app.integrations.aws.weights.errors import WeightsError
from app.integrations.aws.weights.folder import verify_folder
from app.integrations.aws.weights.location import S3Location
from app.integrations.aws.weights.locks import FileLock, WaitLog
from app.integrations.aws.weights.manifest import Manifest
from app.integrations.aws.weights.progress import ProgressCallback
from app.integrations.aws.weights.reader import S3Reader
from app.integrations.aws.weights.staging import (
    prepare_staging,
    publish,
    require_free_space,
)

_log = structlog.get_logger("snapkv.weights")

#: Makes a client for so many calls at once.
CreateClient = Callable[[int], Any]


def default_client(max_connections: int) -> Any:
    """Make the client that everything but tests uses."""
    return create_s3_client(max_connections=max_connections)


class Puller:
    """Fetches models; each call works on its own."""

    def __init__(
        self,
        on_progress: ProgressCallback,
        *,
        create_client: CreateClient = default_client,
        limits: DownloadLimits | None = None,
    ) -> None:
        """Remember how to fetch.

        Args:
            on_progress: Told a few times a second how far a download is.
            create_client: Makes the S3 client of a call.
            limits: How hard to try; None takes the defaults.
        """
        self._on_progress = on_progress
        self._create_client = create_client
        self._limits = limits or DownloadLimits()

    def to_cache(self, location: S3Location, cache: WeightsCache) -> HeldWeights:
        """Return a model's folder in the cache, fetched unless it is there.

        Raises:
            WeightsError: It cannot be had; one line that names the object or the folder.
        """
        started_s = time.monotonic()
        with _as_weights_error():
            reader = self._reader(location)
            manifest = fetch_manifest(reader, self._limits)
            held = cache.obtain(manifest, lambda staging: self._fill(reader, manifest, staging))
        _log_ready(location, manifest, started_s)
        return held

    def to_folder(self, location: S3Location, folder: Path) -> Manifest:
        """Fetch a model into a folder that does not exist, or holds the same model already.

        Returns:
            The manifest, which the folder agrees with.

        Raises:
            WeightsError: It cannot be had, or something else is in the folder.
        """
        started_s = time.monotonic()
        folder = Path(os.path.abspath(folder.expanduser()))
        with _as_weights_error():
            reader = self._reader(location)
            manifest = fetch_manifest(reader, self._limits)
            folder.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder.with_name(f".{folder.name}.lock"))
            lock.acquire(shared=False, on_wait=WaitLog(str(folder)))
            try:
                self._obtain(reader, manifest, folder)
            finally:
                lock.release(remove=True)
        _log_ready(location, manifest, started_s)
        return manifest

    def _obtain(self, reader: S3Reader, manifest: Manifest, folder: Path) -> None:
        if folder.is_dir() and any(folder.iterdir()):
            if verify_folder(folder) != manifest:
                raise WeightsError(f"{folder}: holds another model; remove it or name a new folder")
            return
        staging = folder.with_name(f".{folder.name}{PARTIAL_SUFFIX}")
        prepare_staging(staging, manifest)
        require_free_space(staging, manifest)
        self._fill(reader, manifest, staging)
        publish(staging, folder)

    def _fill(self, reader: S3Reader, manifest: Manifest, staging: Path) -> None:
        _log.info(
            "weights_download_started",
            source=str(reader.location),
            weights_fingerprint=manifest.fingerprint,
            num_files=len(manifest.files),
            total_bytes=manifest.total_bytes,
        )
        download_files(reader, manifest, staging, self._limits, self._on_progress)

    def _reader(self, location: S3Location) -> S3Reader:
        return S3Reader(make_client(self._create_client, self._limits.max_parallel), location)


def make_client(create_client: CreateClient, max_connections: int) -> Any:
    """Make a client.

    Raises:
        WeightsError: The SDK's own configuration is not acceptable.
    """
    try:
        return create_client(max_connections)
    except (BotoCoreError, ValueError) as error:
        # Without its words: an endpoint may hold a password.
        raise WeightsError(
            f"the AWS configuration of this process is not acceptable ({type(error).__name__})"
        ) from error


@contextmanager
def _as_weights_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise WeightsError(f"{where}{error.strerror or type(error).__name__}") from error


def _log_ready(location: S3Location, manifest: Manifest, started_s: float) -> None:
    _log.info(
        "weights_ready",
        source=str(location),
        weights_fingerprint=manifest.fingerprint,
        total_bytes=manifest.total_bytes,
        duration_ms=round((time.monotonic() - started_s) * 1e3, 3),
    )
