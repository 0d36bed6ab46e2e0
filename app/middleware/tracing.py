"""Opens a trace around every request that is to have one, and closes it at the answer's end."""

from typing import Final

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.middleware.request_log import ROUTINE_PATHS, known_method, route_of
from app.telemetry.tracing.headers import TRACE_HEADER
from app.telemetry.tracing.trace import RequestEnd, RequestTracer, current

#: What is noted for a request that was never answered: nobody was there any more.
_NOT_ANSWERED: Final = 499


class TracingMiddleware:
    """Stands outside whatever logs a request, so that its lines carry the trace's id.

    Pure ASGI: what a streamed answer does in its own tasks happens in the trace's context, and the
    trace ends with the last byte. Health checks and scrapes are not traced.
    """

    def __init__(self, app: ASGIApp, tracer: RequestTracer) -> None:
        """Wrap `app`; whoever built `tracer` closes it."""
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["path"].startswith(ROUTINE_PATHS):
            await self._app(scope, receive, send)
            return
        begun = self._tracer.begin(Headers(scope=scope))
        if begun.trace is None and begun.header is None:
            await self._app(scope, receive, send)
            return
        status = _NOT_ANSWERED

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if begun.header is not None:
                    MutableHeaders(scope=message)[TRACE_HEADER] = begun.header
            await send(message)

        if begun.trace is None:
            await self._app(scope, receive, send_named)
            return
        failure = None
        try:
            with (
                current(begun.trace),
                structlog.contextvars.bound_contextvars(trace_id=begun.trace.trace_id),
            ):
                await self._app(scope, receive, send_named)
        except BaseException as error:
            # An answer that broke off has a status already; cancelled means its reader is gone.
            failure = "error" if isinstance(error, Exception) else "aborted"
            raise
        finally:
            outcome = scope.get("state", {}).get("outcome") or failure
            end = RequestEnd(known_method(scope), route_of(scope), status, outcome)
            self._tracer.end(begun.trace, end)
