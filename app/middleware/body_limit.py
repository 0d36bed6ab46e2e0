"""Stops waiting for a request's body once it is longer, or takes longer, than is accepted."""

import asyncio
import contextlib
from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: How much of a refused body is read and thrown away, and for how long.
MAX_DISCARDED_BYTES: Final = 64 * 1024 * 1024
MAX_DISCARD_S: Final = 10.0


class BodyLimitMiddleware:
    """Counts the bytes of a body while it arrives, declared length or not, and its time.

    The error is raised to whoever reads the body, inside the app's own error handling; a route
    that reads no body never fails for one.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, timeout_s: float) -> None:
        """Wrap `app`.

        Args:
            app: What reads the bodies.
            max_body_bytes: Longest body that passes.
            timeout_s: Longest time between a request's head and the end of its body, seconds.
        """
        self._app = app
        self._timeout_s = timeout_s
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        is_declared_too_large = _declared_length(headers) > self._max_body_bytes
        # A client that asks first sends its body only when somebody reads it.
        asks_first = headers.get("expect", "").lower() == "100-continue"
        num_received = 0
        give_up_at_s = asyncio.get_running_loop().time() + self._timeout_s
        is_complete = False

        async def receive_counted() -> Message:
            nonlocal num_received, is_complete
            if is_declared_too_large:
                if not asks_first:
                    await _discard_rest(receive)
                raise self._too_large()
            if is_complete:  # what is waited for now is that the client leaves
                return await receive()
            try:
                async with asyncio.timeout_at(give_up_at_s):
                    message = await receive()
            except TimeoutError:
                raise self._too_late() from None
            is_complete = not message.get("more_body", False)
            num_received += len(message.get("body", b""))
            if num_received > self._max_body_bytes:
                if message.get("more_body", False):
                    await _discard_rest(receive)
                raise self._too_large()
            return message

        await self._app(scope, receive_counted, send)

    def _too_late(self) -> HTTPException:
        return HTTPException(
            status_code=408,
            detail=f"the request body did not arrive within {self._timeout_s:g} seconds",
            headers={"Connection": "close"},
        )

    def _too_large(self) -> HTTPException:
        return HTTPException(
            status_code=413,
            detail=f"the request body is larger than {self._max_body_bytes} bytes",
            # Part of the body may be unread, so the connection cannot carry another request.
            headers={"Connection": "close"},
        )


def _declared_length(headers: Headers) -> int:
    text = headers.get("content-length", "")
    # int() also takes signs and underscores, and refuses thousands of digits; a body that lies
    # about its length is counted while it arrives.
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else 0


async def _discard_rest(receive: Receive) -> None:
    # Closing a connection with unread data resets it, and the reset may overtake the 413 on its
    # way to a client that is still sending.
    num_discarded = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(MAX_DISCARD_S):
            while num_discarded < MAX_DISCARDED_BYTES:
                message = await receive()
                num_discarded += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
