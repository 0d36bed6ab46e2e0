"""What answers the lines of a batch: the app in this process, or a server; both over its routes."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

import httpx

from app.api.dependencies import AppParts
from app.cli.batch.errors import BatchStoppedError
from app.cli.batch.lines import BatchRequest, LineError
from app.cli.batch.results import answer_record, error_record
from app.main import LoadEngine, create_app
from app.middleware.request_id import REQUEST_ID_HEADER
from app.services.engine_host import EngineState
from app.settings import Settings
from snapkv_core import ModelLoadError

#: The server, or whoever stands before it, takes no work now and may do so later.
_RETRIED: Final = frozenset({429, 502, 503})
#: How long a line is tried again before the whole run is given up.
PATIENCE_S: Final = 600.0
_MAX_RETRY_AFTER_S: Final = 3_600.0
_FIRST_BACKOFF_S: Final = 1.0
_MAX_BACKOFF_S: Final = 30.0

#: An answer comes whole, after however long the server gives a request.
_TIMEOUT: Final = httpx.Timeout(10.0, read=3_600.0, pool=None)
#: The longest that an engine can give a request, seconds.
_NO_HURRY_S: Final = 86_400.0
_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Service:
    """Answers lines.

    Attributes:
        client: Sends requests to the routes.
        max_in_flight: How many lines to send at once.
        is_lost: Tells that nothing will ever be answered any more.
        ending: Set when the run is to end: nothing is tried again.
    """

    client: httpx.AsyncClient
    max_in_flight: int
    is_lost: Callable[[], bool]
    ending: asyncio.Event

    async def answer(self, request: BatchRequest) -> dict[str, Any] | None:
        """Return the result of a line; None where the run ended before there was one.

        Raises:
            BatchStoppedError: No line will be answered: the key is refused, or the service takes
                no work.
        """
        headers = {"Content-Type": "application/json", REQUEST_ID_HEADER: request.result_id}
        response = await self._ask(
            self.client.build_request("POST", request.url, content=request.content, headers=headers)
        )
        if response is None:
            return None
        try:
            body = response.json()
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            reason = f"the server answered {response.status_code} without a JSON object"
            error = LineError(request.result_id, request.custom_id, "no_json_answer", reason)
            return error_record(error)
        request_id = response.headers.get(REQUEST_ID_HEADER, request.result_id)
        return answer_record(
            request.result_id, request.custom_id, response.status_code, request_id, body
        )

    async def require_models(self) -> None:
        """Check that this is such a service and that it knows the key, before any line is sent.

        Raises:
            BatchStoppedError: It is not, or it cannot be reached.
        """
        try:
            await self.client.get("/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            # ValueError: proxy settings and host names that cannot be encoded.
            reason = str(error) or type(error).__name__
            raise BatchStoppedError(f"{self.client.base_url}: {reason}") from None
        response = await self._ask(self.client.build_request("GET", "/v1/models"))
        if response is not None and response.status_code != httpx.codes.OK:
            raise BatchStoppedError(
                f"{self.client.base_url}: GET /v1/models is answered with {response.status_code}"
            )

    async def _ask(self, request: httpx.Request) -> httpx.Response | None:
        """Send until there is an answer that stays."""
        give_up_s = time.monotonic() + PATIENCE_S
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                response = await self.client.send(request)
            except httpx.TransportError as error:
                wait_s, reason = backoff_s, str(error) or type(error).__name__
            else:
                if response.status_code == httpx.codes.UNAUTHORIZED:
                    raise BatchStoppedError(f"the server refuses the key: {_message_of(response)}")
                if response.status_code not in _RETRIED:
                    return response
                wait_s = _retry_after_s(response) or backoff_s
                reason = _message_of(response)
            if self.is_lost() or time.monotonic() > give_up_s:
                raise BatchStoppedError(f"no more lines are taken: {reason}")
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            if await _is_set_within(self.ending, wait_s):
                return None


@asynccontextmanager
async def service_here(
    settings: Settings, ending: asyncio.Event, load_engine: LoadEngine
) -> AsyncIterator[Service]:
    """Load the model and answer by the app itself, as a server would over HTTP.

    Raises:
        ModelLoadError: The model cannot be loaded.
    """
    failures: list[str] = []
    quiet = settings_of_batch(settings)
    app = create_app(quiet, load_engine=load_engine, on_load_failed=failures.append)
    parts: AppParts = app.state.parts
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://snapkv", timeout=None) as client,
    ):
        # Whoever loads can wake no task; the end of the run may come from a signal meanwhile.
        while parts.engine_host.state is EngineState.LOADING and not ending.is_set():  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        if failures:
            raise ModelLoadError(failures[0])
        yield Service(
            client,
            max_in_flight=max_in_flight_here(settings),
            is_lost=lambda: not parts.engine_host.is_alive,
            ending=ending,
        )


@asynccontextmanager
async def service_there(
    url: str, api_key: str | None, concurrency: int, ending: asyncio.Event
) -> AsyncIterator[Service]:
    """Answer by a running server, with a key if it wants one.

    Raises:
        BatchStoppedError: There is no such server, or it does not know the key.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=_TIMEOUT, limits=limits
    ) as client:
        service = Service(client, concurrency, is_lost=lambda: False, ending=ending)
        await service.require_models()
        yield service


def settings_of_batch(settings: Settings) -> Settings:
    """Return settings without what is for other people's requests.

    Nobody needs a key or is traced, no item or metric is written for each line, and a request has
    all the time there is, unless the settings name a limit.
    """
    changed: dict[str, object] = {
        "auth": "off",
        "tracing": "off",
        "emf": "off",
        "request_log_table": None,
    }
    if "request_timeout_s" not in settings.model_fields_set:
        changed["request_timeout_s"] = _NO_HURRY_S
    return settings.model_copy(update=changed)


def max_in_flight_here(settings: Settings) -> int:
    """Return how many lines keep an engine's batch full.

    Beside the sequences that it holds, as many wait: one of them takes a place the moment it is
    free, and an answer is still not long on its way.
    """
    return settings.max_num_seqs + min(settings.max_num_seqs, settings.max_num_waiting)


async def _is_set_within(event: asyncio.Event, wait_s: float) -> bool:
    try:
        async with asyncio.timeout(wait_s):
            return await event.wait()
    except TimeoutError:
        return False


def _retry_after_s(response: httpx.Response) -> float | None:
    """Read the header, which holds seconds or a date."""
    given = response.headers.get("Retry-After", "")
    if given.isascii() and given.isdecimal():
        seconds = float(given[:18])
    else:
        try:
            date = parsedate_to_datetime(given)
        except ValueError:
            return None
        if date.tzinfo is None:
            date = date.replace(tzinfo=UTC)
        seconds = (date - datetime.now(UTC)).total_seconds()
    return min(max(0.1, seconds), _MAX_RETRY_AFTER_S)


def _message_of(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])[:300]
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"the server answered {response.status_code}"
