"""Who has requests in the engine, those that are being tokenised included, and who may add one."""

import threading
from collections import Counter
from collections.abc import Callable

from snapkv_core.engine.response_stream import ResponseStream
from snapkv_core.errors import QueueFullError


class WaitingRoom:
    """Counts requests by tenant, up to a number; nobody can take the last place of everybody else.

    In a full room a tenant without any request still has a place, so that there may be as many
    more requests as there are tenants beyond the first.

    Streams belong to one event loop; requests that are being prepared are counted on any thread.
    """

    def __init__(self, num_places: int) -> None:
        """Build an empty room."""
        self._num_places = num_places
        self._streams: dict[ResponseStream, str] = {}
        self._lock = threading.Lock()
        self._preparing: Counter[str] = Counter()  # under the lock

    @property
    def num_preparing(self) -> int:
        """Requests that are being prepared."""
        with self._lock:
            return self._preparing.total()

    def require_place(self, tenant: str, retry_after_s: Callable[[], float]) -> None:
        """Check that a tenant may add a request; `retry_after_s` is asked if it may not.

        Raises:
            QueueFullError: All places are taken, some of them by this tenant.
        """
        with self._lock:
            num_preparing, has_preparing = self._preparing.total(), self._preparing[tenant] > 0
        num_taken = len(self._streams) + num_preparing
        if num_taken < self._num_places:
            return
        if has_preparing or tenant in self._streams.values():
            raise QueueFullError(num_taken, retry_after_s())

    def begin_preparing(self, tenant: str) -> None:
        """Count a request that is to be tokenised."""
        with self._lock:
            self._preparing[tenant] += 1

    def end_preparing(self, tenant: str) -> None:
        """Count it no longer."""
        with self._lock:
            self._preparing[tenant] -= 1
            if not self._preparing[tenant]:
                del self._preparing[tenant]

    def enter(self, stream: ResponseStream, tenant: str) -> None:
        """Count a request that is in the engine."""
        self._streams[stream] = tenant

    def leave(self, stream: ResponseStream) -> None:
        """Count it no longer; harmless when it is not counted."""
        self._streams.pop(stream, None)
