"""Gives every request a name, in its state, its logs and its answer's headers."""

import re
import uuid
from typing import Final

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID_HEADER: Final = "X-Request-Id"

_VALID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")


class RequestIdMiddleware:
    """Takes a caller's `X-Request-Id` when it is harmless, and makes one up otherwise."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap `app`."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A caller's id goes into log lines and headers, so anything unusual is replaced.
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = given if _VALID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            await self._app(scope, receive, send_named)
