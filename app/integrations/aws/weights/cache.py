"""Models that were fetched before: found again, kept while they are in use, removed for others.

```text
folder/
    cache.lock                 held while folders appear or disappear
    <fingerprint>/             a whole model
    <fingerprint>.partial/     a download that is under way, or was cut short
    <fingerprint>.lock         held shared by who uses the model, exclusively by who fetches it
```
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from app.integrations.aws.weights.errors import WeightsError
from app.integrations.aws.weights.folder import is_intact
from app.integrations.aws.weights.locks import FileLock, WaitLog
from app.integrations.aws.weights.manifest import Manifest
from app.integrations.aws.weights.staging import (
    folder_bytes,
    prepare_staging,
    publish,
    remove_folder,
    require_free_space,
    sweep_removed,
)

_log = structlog.get_logger("snapkv.weights")

PARTIAL_SUFFIX: Final = ".partial"
_MODEL_NAME: Final = re.compile(r"[0-9a-f]{64}(\.partial)?")


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """A model's folder that nobody removes before `release`, or the end of this process.

    Attributes:
        folder: The folder.
        fingerprint: SHA-256 of its manifest.
        lock: What keeps it.
    """

    folder: Path
    fingerprint: str
    lock: FileLock

    def release(self) -> None:
        """Let it be removed when room is needed."""
        self.lock.release()


class WeightsCache:
    """A folder of models by fingerprint, shared by all processes of a machine.

    What is in use or being fetched has its lock held, and is never removed.
    """

    def __init__(self, folder: str | Path, max_bytes: int | None) -> None:
        """Name the folder; it is made when it is first needed.

        Args:
            folder: Where models are kept.
            max_bytes: Bytes they may have together; None sets no limit.
        """
        self._folder = Path(folder)
        self._max_bytes = max_bytes

    def obtain(self, manifest: Manifest, fill: Callable[[Path], None]) -> HeldWeights:
        """Return the model of a manifest, fetched unless it is there.

        Args:
            manifest: What the model consists of.
            fill: Brings every file into a folder that `prepare_staging` made, and verifies it.

        Raises:
            WeightsError: There is no room for it, or whatever `fill` raises.
            OSError: The folder cannot be used.
        """
        fingerprint = manifest.fingerprint
        # Not before it is needed: a process that has no home may never ask for weights.
        self._folder = _expanded(self._folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        target = self._folder / fingerprint
        lock = self._lock_of(fingerprint)
        try:
            while True:
                lock.acquire(shared=True, on_wait=WaitLog(fingerprint))
                if is_intact(target, manifest):
                    os.utime(target)
                    return HeldWeights(target, fingerprint, lock)
                lock.acquire(shared=False, on_wait=WaitLog(fingerprint))
                if not is_intact(target, manifest):
                    self._fetch(manifest, target, fill)
        except BaseException:
            lock.release()
            raise

    def _fetch(self, manifest: Manifest, target: Path, fill: Callable[[Path], None]) -> None:
        staging = target.with_name(target.name + PARTIAL_SUFFIX)
        with self._alone():
            sweep_removed(self._folder)
            remove_folder(target)
            self._make_room(manifest)
            # Others count these bytes from now on.
            prepare_staging(staging, manifest)
        require_free_space(staging, manifest)
        fill(staging)
        with self._alone():
            publish(staging, target)

    def _make_room(self, manifest: Manifest) -> None:
        if self._max_bytes is None:
            return
        needed = manifest.total_bytes + len(manifest.canonical)
        if needed > self._max_bytes:
            raise WeightsError(
                f"the weights have {needed:,} bytes and the cache {self._folder} may hold "
                f"{self._max_bytes:,} (SNAPKV_WEIGHTS_CACHE_MAX_BYTES)"
            )
        others = [folder for folder in self._folders() if manifest.fingerprint not in folder.name]
        used = {folder: folder_bytes(folder) for folder in others}
        excess = sum(used.values()) + needed - self._max_bytes
        for folder in sorted(others, key=_removal_order):
            if excess <= 0:
                return
            if self._remove_unless_in_use(folder):
                excess -= used[folder]
        if excess > 0:
            raise WeightsError(
                f"the weights have {needed:,} bytes, the cache {self._folder} may hold "
                f"{self._max_bytes:,} (SNAPKV_WEIGHTS_CACHE_MAX_BYTES), and models in use leave "
                f"{excess:,} too few"
            )

    def _remove_unless_in_use(self, folder: Path) -> bool:
        fingerprint = folder.name.removesuffix(PARTIAL_SUFFIX)
        lock = self._lock_of(fingerprint)
        if not lock.try_acquire(shared=False):
            return False
        try:
            num_bytes = remove_folder(folder)
        finally:
            lock.release(remove=True)
        _log.info("weights_removed", weights_fingerprint=fingerprint, num_bytes=num_bytes)
        return True

    def _folders(self) -> list[Path]:
        # Nothing else that lies there is ours to remove.
        return [path for path in self._folder.iterdir() if _MODEL_NAME.fullmatch(path.name)]

    def _lock_of(self, fingerprint: str) -> FileLock:
        return FileLock(self._folder / f"{fingerprint}.lock")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        lock = FileLock(self._folder / "cache.lock")
        lock.acquire(shared=False, on_wait=WaitLog("cache"))
        try:
            yield
        finally:
            lock.release()


def _expanded(folder: Path) -> Path:
    try:
        return folder.expanduser()
    except RuntimeError:
        raise WeightsError(
            f"{folder}: this user has no home folder; set SNAPKV_WEIGHTS_CACHE_DIR"
        ) from None


def _removal_order(folder: Path) -> tuple[bool, float]:
    """Whole models first, the longest unused ahead; a download cut short may yet go on."""
    return folder.name.endswith(PARTIAL_SUFFIX), folder.stat().st_mtime
