"""Reads the lines of a batch's input one by one, and tells what is wrong with one."""

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO, Final, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError
from starlette.exceptions import HTTPException

from app.api.schemas.common import Text, require_unicode
from app.api.strict_json import parse_json
from app.cli.batch.errors import BatchStoppedError

#: What a line may have around the largest body.
MAX_ENVELOPE_BYTES: Final = 64 * 1024
_CHUNK_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class RawLine:
    """One line that is not blank.

    Attributes:
        number: Its number in the file, from 1, blank lines counted.
        end: Offset of the byte behind it.
        text: The line; only its beginning where it is too long.
        is_too_long: Whether it is longer than any request may be.
        result_id: Name of its result, which follows from the line and its number alone: so a
            later run can tell whether a result belongs to the line that stands there now.
    """

    number: int
    end: int
    text: bytes
    is_too_long: bool
    result_id: str


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line that can be sent."""

    result_id: str
    custom_id: str
    url: str
    content: bytes


@dataclass(frozen=True, slots=True)
class LineError:
    """A line that cannot be sent, and why; without a `custom_id` where it has none."""

    result_id: str
    custom_id: str | None
    code: str
    message: str


class _Envelope(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    custom_id: Annotated[Text, StringConstraints(min_length=1)]
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]


class SeenIds:
    """The `custom_id`s of the lines so far, in a file that nobody else sees.

    An input may have more of them than memory should hold.
    """

    def __init__(self) -> None:
        # An empty name is a temporary file, which goes with the connection.
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("PRAGMA synchronous = OFF")
        self._database.execute("CREATE TABLE seen (digest BLOB PRIMARY KEY) WITHOUT ROWID")

    def add(self, custom_id: str) -> bool:
        """Remember an id; false when it was there already.

        Raises:
            BatchStoppedError: There is no room for the temporary file.
        """
        digest = hashlib.sha256(custom_id.encode()).digest()[:16]
        try:
            added = self._database.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,))
        except sqlite3.Error as error:
            raise BatchStoppedError(f"the temporary file of custom_ids: {error}") from error
        return added.rowcount == 1

    def close(self) -> None:
        """Drop the file."""
        self._database.close()


def read_lines(file: BinaryIO, max_body_bytes: int, *, num_before: int = 0) -> Iterator[RawLine]:
    """Yield the lines of a file from where it stands; none is held longer than it is needed.

    Args:
        file: The input, open for reading.
        max_body_bytes: Largest body of a request.
        num_before: Lines before the place where the file stands.

    Raises:
        BatchStoppedError: The file cannot be read any further.
    """
    limit = max_body_bytes + MAX_ENVELOPE_BYTES
    number, end = num_before, file.tell()
    try:
        while text := file.readline(limit + 1):
            number += 1
            digest = hashlib.sha256(b"%d\n" % number)
            digest.update(text)
            end += len(text)
            last = text
            while not last.endswith(b"\n") and (last := file.readline(_CHUNK_BYTES)):
                digest.update(last)
                end += len(last)
            if text.strip():
                is_too_long = len(text) > limit
                result_id = f"batch_req_{digest.hexdigest()[:32]}"
                yield RawLine(number, end, text, is_too_long, result_id)
    except OSError as error:
        raise BatchStoppedError(f"the input, line {number + 1}: {error.strerror}") from error


def read_request(line: RawLine, seen: SeenIds) -> BatchRequest | LineError:
    """Return what is to be sent for a line, or what is wrong with it.

    Only what a server would not see is checked here: the line around the body.

    Raises:
        BatchStoppedError: There is no room to remember its `custom_id`.
    """
    if line.is_too_long:
        return _error(line, None, "line_too_long", "is longer than any request may be")
    try:
        parsed = parse_json(line.text)
    except HTTPException as error:
        # The reader is that of bodies, and so are its words.
        reason = error.detail.removeprefix("the body ")
        return _error(line, None, "invalid_json", reason)
    custom_id = _custom_id_of(parsed)
    if custom_id is not None and not seen.add(custom_id):
        reason = "custom_id: an earlier line has the same"
        return _error(line, custom_id, "duplicate_custom_id", reason)
    try:
        envelope = _Envelope.model_validate(parsed)
    except ValidationError as invalid:
        return _error(line, custom_id, "invalid_line", "; ".join(_problems(invalid)))
    if envelope.body.get("stream") is True:
        reason = "body.stream: a batch has whole answers only; leave it out"
        return _error(line, custom_id, "stream_not_supported", reason)
    return BatchRequest(
        line.result_id, envelope.custom_id, envelope.url, to_json_bytes(envelope.body)
    )


def to_json_bytes(value: Mapping[str, Any]) -> bytes:
    """Return JSON in UTF-8 on one line; half a surrogate pair, which UTF-8 lacks, is escaped."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode("ascii")


def _custom_id_of(parsed: Any) -> str | None:
    custom_id = parsed.get("custom_id") if isinstance(parsed, dict) else None
    if not isinstance(custom_id, str) or not custom_id:
        return None
    try:
        return require_unicode(custom_id)
    except ValueError:
        return None


def _problems(invalid: ValidationError) -> Iterator[str]:
    for detail in invalid.errors(include_url=False, include_input=False):
        # An unknown field's name is the caller's, so it may be anything.
        name = ".".join(str(part)[:80] for part in detail["loc"])
        name = name.encode("utf-8", "backslashreplace").decode("utf-8")
        if detail["type"] == "extra_forbidden":
            yield f"{name}: unknown field"
        elif detail["type"] == "missing":
            yield f"{name}: is missing"
        elif detail["type"] in ("model_type", "model_attributes_type"):
            yield "must be a JSON object"
        else:
            message = detail["msg"].removeprefix("Value error, ").replace("Input should", "must")
            yield f"{name}: {message}"


def _error(line: RawLine, custom_id: str | None, code: str, reason: str) -> LineError:
    return LineError(line.result_id, custom_id, code, f"line {line.number}: {reason}")
