"""Owns the output of a batch: results in the order of the input, added to and never rewritten."""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from json import JSONDecodeError, loads
from pathlib import Path
from typing import Any, Final

from app.cli.batch.errors import BatchStoppedError
from app.cli.batch.lines import LineError, RawLine, to_json_bytes
from app.cli.generate import CommandError

#: No result is nearly as long; a file without line ends must not be read as one line.
_MAX_RESULT_BYTES: Final = 256 * 1024 * 1024
_OF_ANOTHER_RUN: Final = "is not the output of this input; name another file, or remove it"


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the input: lines before it, and its offset in bytes."""

    num_lines: int = 0
    offset: int = 0


def answer_record(
    result_id: str, custom_id: str, status_code: int, request_id: str, body: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the result of a line that was answered, as OpenAI's batches word it."""
    response = {"status_code": status_code, "request_id": request_id, "body": body}
    return {"id": result_id, "custom_id": custom_id, "response": response, "error": None}


def error_record(error: LineError) -> dict[str, Any]:
    """Return the result of a line that was never answered."""
    return {
        "id": error.result_id,
        "custom_id": error.custom_id,
        "response": None,
        "error": {"code": error.code, "message": error.message},
    }


class ResultFile:
    """The output of a run; no other run can write to it meanwhile.

    It is a beginning of the whole output at any moment, a torn result at its end apart.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file.

        Raises:
            CommandError: It cannot be written, is no file, or another run writes to it.
        """
        self._path = path
        self._end = 0
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise CommandError(f"{path}: {error.strerror}") from None
        try:
            self._require_own_file()
        except CommandError:
            os.close(self._descriptor)
            raise

    def is_same_file(self, other: os.stat_result) -> bool:
        """Tell whether this is that file, whatever they are called."""
        return os.path.samestat(os.fstat(self._descriptor), other)

    def keep_finished(
        self, lines: Iterable[RawLine], on_kept: Callable[[Mapping[str, Any], int], None]
    ) -> Position:
        """Go through the results of an earlier run, and cut off one that was not written wholly.

        Args:
            lines: The input from its beginning.
            on_kept: Told of each result that stays, and where in the input its line ends.

        Returns:
            Where in the input the first line without a result stands, or one before it is blank.

        Raises:
            CommandError: A result is not that of its line; nothing was changed.
            BatchStoppedError: The file cannot be read or cut.
        """
        position = Position()
        unread = iter(lines)
        try:
            with self._path.open("rb") as file:
                while text := file.readline(_MAX_RESULT_BYTES):
                    line = next(unread, None)
                    if line is None or not _can_begin(text, line.result_id):
                        raise CommandError(f"{self._path}: {_OF_ANOTHER_RUN}")
                    if not text.endswith(b"\n"):
                        break
                    on_kept(self._parsed(text), line.end)
                    self._end += len(text)
                    position = Position(line.number, line.end)
            os.ftruncate(self._descriptor, self._end)
        except OSError as error:
            raise BatchStoppedError(f"{self._path}: {error.strerror}") from error
        return position

    def write(self, result: bytes) -> None:
        """Add a result.

        Raises:
            BatchStoppedError: The disk is full, or the like; no part of the result stays.
        """
        rest = memoryview(result)
        try:
            while rest:
                rest = rest[
                    os.pwrite(self._descriptor, rest, self._end + len(result) - len(rest)) :
                ]
        except OSError as error:
            with contextlib.suppress(OSError):  # the next run cuts it off as well
                os.ftruncate(self._descriptor, self._end)
            raise BatchStoppedError(f"{self._path}: {error.strerror}") from error
        self._end += len(result)

    def close(self) -> None:
        """Let the disk have everything, and others the file."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise BatchStoppedError(f"{self._path}: {error.strerror}") from error
        finally:
            os.close(self._descriptor)

    def _require_own_file(self) -> None:
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            raise CommandError(f"{self._path}: must be a file, which a later run can go on with")
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            is_taken = error.errno == errno.EWOULDBLOCK
            reason = "another run writes to it" if is_taken else error.strerror
            raise CommandError(f"{self._path}: {reason}") from None

    def _parsed(self, text: bytes) -> Mapping[str, Any]:
        try:
            record = loads(text)
        except (JSONDecodeError, UnicodeDecodeError, RecursionError):
            raise CommandError(f"{self._path}: {_OF_ANOTHER_RUN}") from None
        assert isinstance(record, dict), "it begins as a result does"
        return record


def _can_begin(text: bytes, result_id: str) -> bool:
    """Tell whether a result, or as much as there is of it, is the one with this id."""
    beginning = to_json_bytes({"id": result_id}).removesuffix(b"}")
    return beginning.startswith(text[: len(beginning)])
