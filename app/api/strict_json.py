"""Reads JSON bodies strictly: one media type, UTF-8, and never an exception.

NaN and infinities are let through to the fields, which refuse them by name.
"""

import json
import math
from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

MAX_INT_DIGITS: Final = 4_000
#: More than any schema of an answer, or bias of tokens, has.
MAX_OBJECT_FIELDS: Final = 2_048


class StrictJSONRequest(Request):
    """A request whose body is what RFC 8259 calls JSON, not what Python's parser takes."""

    async def json(self) -> Any:
        """Return the parsed body.

        Raises:
            HTTPException: 422, it is not JSON; the message quotes none of it.
        """
        if not hasattr(self, "_json"):
            self._json = parse_json(await self.body())
        return self._json


class StrictJSONRoute(APIRoute):
    """A route that hands its endpoint strictly read JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of one request."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            _require_json_type(request)
            return await handle(StrictJSONRequest(request.scope, request.receive))

        return handle_strictly


def parse_json(body: bytes) -> Any:
    """Parse one JSON document.

    Raises:
        HTTPException: 422 with the reason.
    """
    try:
        return json.loads(body.decode("utf-8"), parse_int=_read_int, object_pairs_hook=_read_object)
    except UnicodeDecodeError:
        reason = "the body is not UTF-8"
    except json.JSONDecodeError as error:
        reason = f"the body is not JSON: {error.msg.removesuffix(' at')} at character {error.pos}"
    except RecursionError:
        reason = "the body is nested too deeply"
    raise HTTPException(status_code=422, detail=reason)


def _read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Each unknown field becomes an error of its own; a megabyte of them took seconds.
    if len(pairs) > MAX_OBJECT_FIELDS:
        raise HTTPException(
            status_code=422, detail=f"an object has more than {MAX_OBJECT_FIELDS} fields"
        )
    names = dict(pairs)
    if len(names) < len(pairs):
        raise HTTPException(status_code=422, detail="an object has a field twice")
    return names


def _read_int(digits: str) -> int | float:
    # Python refuses to read longer integers; infinity is refused with the field's name.
    return int(digits) if len(digits) <= MAX_INT_DIGITS else math.inf


def _require_json_type(request: Request) -> None:
    given = request.headers.getlist("content-type")
    types = {value.partition(";")[0].strip().lower() for value in given}
    # A browser sends other types, and none, across sites without asking first.
    if types != {"application/json"}:
        raise HTTPException(
            status_code=415, detail="send the header Content-Type: application/json, once"
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HTTPException(status_code=415, detail="send the body without Content-Encoding")
