"""Logs and counts every HTTP request, by its route and never by its full address."""

import logging
import time
from collections.abc import Callable
from typing import Final

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.telemetry.logging import HTTP_REQUEST

UNMATCHED_ROUTE: Final = "unmatched"

_OUTCOMES: Final = {
    413: "rejected",
    429: "rejected",
    499: "aborted",
    503: "rejected",
    504: "deadline",
}
ROUTINE_PATHS: Final = ("/health/", "/metrics")
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

_log = structlog.get_logger("snapkv.http")


class RequestLogMiddleware:
    """Tells `on_request` and the log what became of each request.

    A route that knows better than its status code, such as a stream that failed after its first
    byte, sets `outcome` in the request's state; whoever answers with an error sets `error_code`.
    """

    def __init__(
        self, app: ASGIApp, on_request: Callable[[str, str, str | None, float], None]
    ) -> None:
        """Wrap `app`; `on_request` takes route, outcome, the error's code and seconds."""
        self._app = app
        self._on_request = on_request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        state = scope.setdefault("state", {})
        # The status of a request whose handler was cancelled before it answered.
        status = 499

        async def send_watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_watched)
        finally:
            duration_s = time.monotonic() - started_s
            route = route_of(scope)
            outcome = state.get("outcome") or _outcome(status)
            error_code = "client_left" if outcome == "aborted" else state.get("error_code")
            self._on_request(route, outcome, error_code, duration_s)
            # Probes and scrapes come every few seconds and say nothing while they succeed.
            is_routine = outcome == "success" and route.startswith(ROUTINE_PATHS)
            _log.log(
                logging.DEBUG if is_routine else logging.INFO,
                HTTP_REQUEST,
                request_id=state.get("request_id"),
                method=known_method(scope),
                route=route,
                status=status,
                outcome=outcome,
                duration_ms=round(duration_s * 1_000, 3),
            )


def route_of(scope: Scope) -> str:
    """Return the template of a request's path, once the app has routed it."""
    path: str = getattr(scope.get("route"), "path", UNMATCHED_ROUTE)
    return path


def known_method(scope: Scope) -> str:
    """Return a request's method; a caller may send any word for one."""
    method: str = scope["method"]
    return method if method in _METHODS else "OTHER"


def _outcome(status: int) -> str:
    if status in _OUTCOMES:
        return _OUTCOMES[status]
    if status < 400:
        return "success"
    return "invalid" if status < 500 else "error"
