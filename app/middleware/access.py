"""Lets nobody in without a key, before any of a body is read."""

from collections.abc import Callable
from typing import Final

import structlog
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.services.access import AccessControl, AccessDeniedError

#: What probes, scrapers, readers of the API's description and the playground's page need;
#: everything else needs a key.
PUBLIC_PATHS: Final = frozenset(
    {"/", "/health/live", "/health/ready", "/metrics", "/docs", "/openapi.json"}
)
#: Where the files of pages lie, which hold nothing but what is in the repository.
PUBLIC_FOLDERS: Final = ("/docs/", "/playground/")
#: Name of who called, in the request's state and in its log lines.
CALLER: Final = "caller"


class AccessMiddleware:
    """Finds out who calls and leaves the name in the request's state."""

    def __init__(
        self,
        app: ASGIApp,
        access: AccessControl,
        to_response: Callable[[Request, Exception], Response],
    ) -> None:
        """Wrap `app`; `to_response` turns a refusal into an answer."""
        self._app = app
        self._access = access
        self._to_response = to_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or _is_public(scope["path"]):
            await self._app(scope, receive, send)
            return
        try:
            caller = self._access.caller_of(Headers(scope=scope).getlist("authorization"))
        except AccessDeniedError as error:
            await self._to_response(Request(scope), error)(scope, receive, send)
            return
        scope.setdefault("state", {})[CALLER] = caller
        named = {CALLER: caller} if self._access.asks_for_keys else {}
        with structlog.contextvars.bound_contextvars(**named):
            await self._app(scope, receive, send)


def _is_public(path: str) -> bool:
    return path in PUBLIC_PATHS or path.startswith(PUBLIC_FOLDERS)
