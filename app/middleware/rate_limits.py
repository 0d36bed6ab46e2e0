"""Tells callers in headers where they stand with their limits."""

import math
from collections.abc import Callable, Sequence

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.middleware.access import CALLER
from app.services.rate_limits import RateState


class RateLimitHeadersMiddleware:
    """Adds `x-ratelimit-*`, named as OpenAI names them, to each answer of a caller with limits."""

    def __init__(self, app: ASGIApp, states_of: Callable[[str], Sequence[RateState]]) -> None:
        """Wrap `app`; `states_of` says where a caller stands when its answer begins."""
        self._app = app
        self._states_of = states_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        caller = scope.get("state", {}).get(CALLER)
        if scope["type"] != "http" or caller is None:
            await self._app(scope, receive, send)
            return

        async def send_told(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for state in self._states_of(caller):
                    headers[f"x-ratelimit-limit-{state.name}"] = str(state.limit)
                    headers[f"x-ratelimit-remaining-{state.name}"] = str(state.remaining)
                    headers[f"x-ratelimit-reset-{state.name}"] = _seconds(state.reset_s)
            await send(message)

        await self._app(scope, receive, send_told)


def _seconds(duration_s: float) -> str:
    # Rounded up, so that nobody comes back a moment too soon.
    return f"{math.ceil(duration_s * 1_000) / 1_000:g}s"
