"""Locks between processes that share a folder; the system drops them when their holder dies."""

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

_log = structlog.get_logger("snapkv.weights")

_WAIT_LOG_INTERVAL_S: Final = 10.0
_POLL_S: Final = 0.2


class FileLock:
    """A lock file that many may hold shared, or one exclusively.

    Each object stands for one holder, in whichever process or thread.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def try_acquire(self, *, shared: bool) -> bool:
        """Take the lock if that is possible at once, or change the kind that is held.

        Changing the kind may let others in between.

        Raises:
            OSError: The file cannot be opened.
        """
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            return False
        if self._is_current():
            return True
        # Whoever held it before removed the file: this lock keeps nobody out.
        self.release()
        return self.try_acquire(shared=shared)

    def acquire(self, *, shared: bool, on_wait: Callable[[], None]) -> None:
        """Wait until the lock can be taken.

        Args:
            shared: Whether others may hold it too.
            on_wait: Called now and then while others have it.

        Raises:
            OSError: The file cannot be opened.
        """
        while not self.try_acquire(shared=shared):
            on_wait()
            time.sleep(_POLL_S)

    def release(self, *, remove: bool = False) -> None:
        """Let the lock go; harmless when it is not held.

        Args:
            remove: Remove the file as well; only for who holds it exclusively.
        """
        if self._descriptor is None:
            return
        if remove:
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None

    def _is_current(self) -> bool:
        assert self._descriptor is not None, "asked for while it is held"
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._descriptor))


class WaitLog:
    """Says now and then for what this process waits."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._due_s = time.monotonic()

    def __call__(self) -> None:
        """Say it if that is due."""
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + _WAIT_LOG_INTERVAL_S
            # A terminal shows warnings only, and a command that waits looks as if it hung.
            _log.warning("weights_lock_waited_for", lock=self._name)
