"""Stops reading a request's body once it is longer than the service accepts."""

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimitMiddleware:
    """Counts the bytes of a body while it arrives, declared length or not.

    The error is raised to whoever reads the body, inside the app's own error handling; a route
    that reads no body never fails for one.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        """Wrap `app`; bodies of up to `max_body_bytes` pass."""
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = _declared_length(scope)
        num_received = 0

        async def receive_counted() -> Message:
            nonlocal num_received
            if declared > self._max_body_bytes:
                raise self._too_large()
            message = await receive()
            num_received += len(message.get("body", b""))
            if num_received > self._max_body_bytes:
                raise self._too_large()
            return message

        await self._app(scope, receive_counted, send)

    def _too_large(self) -> HTTPException:
        return HTTPException(
            status_code=413,
            detail=f"the request body is larger than {self._max_body_bytes} bytes",
            # The rest of the body is not read, so the connection cannot carry another request.
            headers={"Connection": "close"},
        )


def _declared_length(scope: Scope) -> int:
    text = Headers(scope=scope).get("content-length", "")
    # int() also takes signs and underscores, and refuses thousands of digits; a body that lies
    # about its length is counted while it arrives.
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else 0
