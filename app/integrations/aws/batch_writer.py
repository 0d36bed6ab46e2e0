"""Writes one batch of items to a DynamoDB table and says what became of each of them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from boto3.dynamodb.types import TypeSerializer
from botocore.exceptions import ClientError

from app.integrations.aws.error_code import error_code
from app.integrations.aws.request_item import Item

#: Most items that `BatchWriteItem` takes.
MAX_BATCH_ITEMS: Final = 25
#: With the pauses below, about six seconds (at most 13) of trying while DynamoDB answers at once.
MAX_ATTEMPTS: Final = 8
_FIRST_PAUSE_S: Final = 0.1
_MAX_PAUSE_S: Final = 10.0

#: What trying again does not change.
_REFUSALS: Final = (
    "AccessDeniedException",
    "InvalidSignatureException",
    "ResourceNotFoundException",
    "UnrecognizedClientException",
    "ValidationException",
)

#: Waits so many seconds, or less; returns whether there is time for another attempt.
Pause = Callable[[float], bool]


class UnreadableAnswerError(Exception):
    """What answered in DynamoDB's place is something else."""


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What became of the items of a batch; the three numbers add up to them.

    Attributes:
        num_written: Items that DynamoDB took.
        num_dropped: Items given up on after enough attempts.
        num_failed: Items refused for a reason that trying again does not change.
        reason: Why the last attempt failed: a code, or the name of an error; None when it did not.
    """

    num_written: int
    num_dropped: int
    num_failed: int
    reason: str | None


class BatchWriter:
    """Writes batches to one table; used by one thread."""

    def __init__(self, client: Any, table: str) -> None:
        """Write through `client`, which should not try again itself."""
        self._client = client
        self._table = table
        self._serialize = TypeSerializer().serialize

    def write(self, items: Sequence[Item], pause: Pause) -> BatchResult:
        """Write items, those that are left over again and again; raises nothing.

        Args:
            items: At most `MAX_BATCH_ITEMS`, no two with the same key.
            pause: Waits between attempts, each time up to twice as long and by chance, so that
                replicas which failed together do not come back together.
        """
        left: list[dict[str, Any]] = [{"PutRequest": {"Item": self._typed(item)}} for item in items]
        reason: str | None = None
        for attempt in range(MAX_ATTEMPTS):
            if attempt and not pause(_backoff_s(attempt)):
                break
            try:
                left = self._send(left)
            except ClientError as error:
                reason = error_code(error)
                if reason in _REFUSALS:
                    return BatchResult(len(items) - len(left), 0, len(left), reason)
            except Exception as error:  # whatever a network can do must not end the thread
                reason = type(error).__name__
            else:
                reason = "UnprocessedItems" if left else None
            if not left:
                break
        return BatchResult(len(items) - len(left), len(left), 0, reason)

    def _send(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        answer = self._client.batch_write_item(RequestItems={self._table: requests})
        # The SDK takes any answer with status 200 for success, be it a proxy's page.
        if "UnprocessedItems" not in answer:
            raise UnreadableAnswerError
        left: list[dict[str, Any]] = answer["UnprocessedItems"].get(self._table, [])
        return left[: len(requests)]

    def _typed(self, item: Item) -> dict[str, Any]:
        return {name: self._serialize(value) for name, value in item.items()}


def _backoff_s(attempt: int) -> float:
    longest_s = min(_FIRST_PAUSE_S * 2 ** (attempt - 1), _MAX_PAUSE_S)
    return random.uniform(0.0, longest_s)
