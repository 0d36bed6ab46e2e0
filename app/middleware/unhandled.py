"""Turns an exception nobody expected into an answer, so that no traceback leaves the process."""

from collections.abc import Callable

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.telemetry.logging import UNHANDLED_ERROR

_log = structlog.get_logger("snapkv.http")


class UnhandledErrorMiddleware:
    """Logs what no handler took and answers with whatever `to_response` makes of it."""

    def __init__(self, app: ASGIApp, to_response: Callable[[Request, Exception], Response]) -> None:
        """Wrap `app`."""
        self._app = app
        self._to_response = to_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False

        async def send_watched(message: Message) -> None:
            nonlocal has_started
            has_started = has_started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, send_watched)
        except Exception as error:
            _log.exception(UNHANDLED_ERROR)
            if has_started:
                # Half an answer cannot be taken back; the server closes the connection.
                raise
            await self._to_response(Request(scope), error)(scope, receive, send)
