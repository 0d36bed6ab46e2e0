"""Fetches the files of a manifest in parts, several at once, and checks each of them.

A part is written where it belongs and hashed as it comes. What an earlier attempt left on disk is
hashed too, and fetched only where it is not right: that is all there is to resuming.
"""

import hashlib
import itertools
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from app.integrations.aws.weights.errors import WeightsError
from app.integrations.aws.weights.hashing import hash_file, hash_range
from app.integrations.aws.weights.manifest import Manifest, ManifestFile
from app.integrations.aws.weights.progress import (
    ProgressCallback,
    ProgressLog,
    StallWatch,
    Tally,
)
from app.integrations.aws.weights.reader import BrokenBodyError, S3Reader
from app.integrations.aws.weights.staging import WRITE_FLAGS, written_bytes
from app.integrations.aws.workers import run_parallel

_log = structlog.get_logger("snapkv.weights")

#: Times that a part is fetched whose bytes arrive whole and are not the manifest's.
_MAX_CORRUPT: Final = 2


@dataclass(frozen=True, slots=True)
class DownloadLimits:
    """How hard a download tries.

    Attributes:
        max_parallel: Parts that are fetched at once.
        max_attempts: Tries of a part whose answer breaks off.
        retry_delay_s: Pause before the second of them; each further one is twice as long.
        stall_timeout_s: Time in which S3 must send more than next to nothing.
    """

    max_parallel: int = 8
    max_attempts: int = 4
    retry_delay_s: float = 0.5
    stall_timeout_s: float = 120.0


class _PartialFile:
    """A file of which parts are missing; several threads work on it."""

    def __init__(self, path: Path, spec: ManifestFile) -> None:
        self.path = path
        self.spec = spec
        self.etag = ""
        self.has_old_bytes = written_bytes(path) > 0
        self._guard = threading.Lock()
        self._num_parts_left = len(spec.parts)

    def finish_part(self) -> bool:
        """Count a part that is right; tell whether it was the last."""
        with self._guard:
            self._num_parts_left -= 1
            return self._num_parts_left == 0


@dataclass(frozen=True, slots=True)
class _Part:
    file: _PartialFile
    start: int
    size: int
    sha256: str


def fetch_manifest(reader: S3Reader, limits: DownloadLimits) -> Manifest:
    """Fetch a manifest in bounded time.

    Raises:
        WeightsError: There is none, it is not acceptable, or S3 fails.
    """
    tally, found = Tally(0), []

    def fetch(task: str, stop: threading.Event) -> None:
        del task, stop  # there is one task, and nothing in it that could be cut short
        with tally.waiting_for_s3():
            found.append(reader.read_manifest())

    source = str(reader.location)
    watch = StallWatch(tally, limits.stall_timeout_s, source)
    run_parallel([source], fetch, num_threads=1, on_tick=watch.check)
    return found[0]


def download_files(
    reader: S3Reader,
    manifest: Manifest,
    staging: Path,
    limits: DownloadLimits,
    on_progress: ProgressCallback,
) -> None:
    """Bring every file of a manifest into a folder, verified and written to disk.

    Args:
        reader: Reads the model's objects.
        manifest: What to fetch.
        staging: Folder that `prepare_staging` made.
        limits: How hard to try.
        on_progress: Told a few times a second, on the calling thread, and once at the end.

    Raises:
        WeightsError: A file cannot be had, or is not what the manifest says; what has come stays
            for the next attempt.
        OSError: A file cannot be written.
    """
    tally = Tally(manifest.total_bytes)
    source = str(reader.location)
    watch = StallWatch(tally, limits.stall_timeout_s, source)
    log = ProgressLog(source)

    def on_tick() -> None:
        progress = tally.snapshot()
        on_progress(progress)
        log.on_progress(progress)
        watch.check()

    fetcher = _Fetcher(reader, tally, limits)
    files = [_PartialFile(staging / spec.name, spec) for spec in manifest.files]
    parts = itertools.chain.from_iterable(_parts_of(file, manifest.part_size) for file in files)
    run_parallel(files, fetcher.look_up, num_threads=limits.max_parallel, on_tick=on_tick)
    run_parallel(parts, fetcher.obtain, num_threads=limits.max_parallel, on_tick=on_tick)
    on_progress(tally.snapshot())


class _Fetcher:
    """What the threads of one download do; it holds nothing that they change but the tally."""

    def __init__(self, reader: S3Reader, tally: Tally, limits: DownloadLimits) -> None:
        self._reader = reader
        self._tally = tally
        self._limits = limits

    def look_up(self, file: _PartialFile, stop: threading.Event) -> None:
        """Learn the version of a file's object; an empty file is finished with that."""
        del stop  # one short call
        with self._tally.waiting_for_s3():
            file.etag = self._reader.look_up(file.spec)
            self._tally.count_answer()
        if not file.spec.parts:
            self._finish(file)

    def obtain(self, part: _Part, stop: threading.Event) -> None:
        """Fetch a part unless it is on disk already; finish its file with the last one."""
        descriptor = os.open(part.file.path, WRITE_FLAGS)
        try:
            if part.file.has_old_bytes and _is_there(descriptor, part):
                self._tally.count_found(part.size)
            else:
                self._fetch(descriptor, part, stop)
        finally:
            os.close(descriptor)
        if not stop.is_set() and part.file.finish_part():
            self._finish(part.file)

    def _fetch(self, descriptor: int, part: _Part, stop: threading.Event) -> None:
        num_corrupt = 0
        while not stop.is_set():
            found = self._receive_with_retries(descriptor, part, stop)
            if found == part.sha256 or stop.is_set():
                return
            self._tally.count_found(-part.size)
            num_corrupt += 1
            url = self._url_of(part)
            _log.warning("weights_part_corrupt", source=url, start=part.start, size=part.size)
            if num_corrupt == _MAX_CORRUPT:
                raise WeightsError(
                    f"{url}: bytes {part.start} to {part.start + part.size - 1} have another "
                    f"SHA-256 than in the manifest, {_MAX_CORRUPT} times in a row"
                )

    def _receive_with_retries(self, descriptor: int, part: _Part, stop: threading.Event) -> str:
        for attempt in itertools.count(1):
            try:
                return self._receive(descriptor, part, stop)
            except BrokenBodyError as error:
                url = self._url_of(part)
                if attempt >= self._limits.max_attempts:
                    raise WeightsError(f"{url}: {error}, {attempt} times") from error
                _log.info("weights_part_retried", source=url, start=part.start, reason=str(error))
            if stop.wait(self._limits.retry_delay_s * 2 ** (attempt - 1)):
                break
        return ""

    def _receive(self, descriptor: int, part: _Part, stop: threading.Event) -> str:
        """Write a part to its place and return its hash; of less than all of it when stopped."""
        digest, position = hashlib.sha256(), part.start
        try:
            for chunk in self._chunks(part):
                if stop.is_set():
                    break
                _write(descriptor, chunk, position)
                digest.update(chunk)
                position += len(chunk)
        except BrokenBodyError:
            self._tally.count_found(part.start - position)
            raise
        return digest.hexdigest()

    def _chunks(self, part: _Part) -> Iterator[bytes]:
        """Yield what comes, counted; only waiting for it counts as waiting for S3."""
        file = part.file
        chunks = self._reader.read_range(file.spec, file.etag, part.start, part.size)
        while True:
            with self._tally.waiting_for_s3():
                chunk = next(chunks, None)
            if chunk is None:
                return
            self._tally.count_received(len(chunk))
            yield chunk

    def _finish(self, file: _PartialFile) -> None:
        """Verify a whole file as it is on disk, and make it stay there when the power fails."""
        if hash_file(file.path) != file.spec.sha256:
            raise WeightsError(
                f"{self._reader.location.url_of(file.spec.name)}: its parts are right and the "
                "whole has another SHA-256 than in the manifest, which contradicts itself"
            )
        descriptor = os.open(file.path, WRITE_FLAGS)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _url_of(self, part: _Part) -> str:
        return self._reader.location.url_of(part.file.spec.name)


def _parts_of(file: _PartialFile, part_size: int) -> Iterator[_Part]:
    for index, sha256 in enumerate(file.spec.parts):
        start = index * part_size
        yield _Part(file, start, min(part_size, file.spec.size - start), sha256)


def _is_there(descriptor: int, part: _Part) -> bool:
    return hash_range(descriptor, part.start, part.size) == part.sha256


def _write(descriptor: int, chunk: bytes, position: int) -> None:
    view = memoryview(chunk)
    while view:
        num_written = os.pwrite(descriptor, view, position)
        view, position = view[num_written:], position + num_written
