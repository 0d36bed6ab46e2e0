"""uvicorn's HTTP protocol, with an end to the patience for a request's head."""

import asyncio
from typing import Final

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

#: Heads are sent in one piece; whoever takes longer for one holds a connection and nothing else.
HEAD_TIMEOUT_S: Final = 30.0


class ImpatientProtocol(H11Protocol):
    """Closes connections on which a request's head does not become complete in time.

    uvicorn itself waits without end for a first request, for the rest of one that was begun, and
    behind an answer while the rest of a body arrives that nobody read. The rest of a body that is
    read is the business of `BodyLimitMiddleware`.
    """

    head_timeout_s: float = HEAD_TIMEOUT_S
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Take bytes; a head that they complete is waited for no longer."""
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request, unless it was sent ahead."""
        super().on_response_complete()
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        self._stop_watching()
        super().connection_lost(exc)

    def _watch_head(self) -> None:
        cycle: RequestResponseCycle | None = self.cycle  # uvicorn's annotation forgets the None
        is_answering = cycle is not None and not cycle.response_complete
        if is_answering or self.transport.is_closing():
            self._stop_watching()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self.transport.close)

    def _stop_watching(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
