"""What routes get handed: the parts that `create_app` built, and what a request's headers ask."""

import math
import re
from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import Depends, Header, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import WithJsonSchema

from app.services.engine_host import EngineHost
from app.services.generation import GenerationService
from app.services.tokenizing import TokenizingService
from app.telemetry.metrics import ServiceMetrics
from snapkv_core import InvalidParameterError

TIMEOUT_HEADER: Final = "X-Request-Timeout"

_DECIMAL: Final = re.compile(r"[0-9]+(\.[0-9]+)?")


@dataclass(frozen=True, slots=True)
class AppParts:
    """The objects of one app, made once and shared by its requests."""

    engine_host: EngineHost
    generation: GenerationService
    tokenizing: TokenizingService
    metrics: ServiceMetrics


async def get_parts(request: Request) -> AppParts:
    """Return the parts of the app that serves this request."""
    parts: AppParts = request.app.state.parts
    return parts


async def read_request_timeout(
    request: Request,
    x_request_timeout: Annotated[
        str | None,
        Header(
            description="Seconds after which the request is ended with 504, finished or not; it "
            "can only shorten the server's own limit."
        ),
        # For the description alone: what it says is told apart below, with a message of its own.
        WithJsonSchema({"type": "string", "pattern": f"^{_DECIMAL.pattern}$", "example": "2.5"}),
    ] = None,
) -> float | None:
    """Return the time a caller gives its request, seconds; None when it says nothing.

    Raises:
        InvalidParameterError: The header is no decimal number above 0, or is there twice.
    """
    if x_request_timeout is None:
        return None
    is_single = len(request.headers.getlist(TIMEOUT_HEADER)) == 1
    # float() would also take `1_0`, `inf` and a number with blanks around it.
    if is_single and _DECIMAL.fullmatch(x_request_timeout):
        seconds = float(x_request_timeout)
        if 0 < seconds < math.inf:
            return seconds
    raise InvalidParameterError(
        TIMEOUT_HEADER, "must be one decimal number of seconds, greater than 0, such as 2.5"
    )


async def get_caller(
    request: Request,
    _key: Annotated[
        HTTPAuthorizationCredentials | None,
        Security(HTTPBearer(auto_error=False, description="An API key, where keys are asked for.")),
    ] = None,
) -> str:
    """Return the name of who calls; whether they may was found out before the body was read."""
    caller: str = request.state.caller
    return caller


Caller = Annotated[str, Depends(get_caller)]
Parts = Annotated[AppParts, Depends(get_parts)]
RequestTimeout = Annotated[float | None, Depends(read_request_timeout)]
