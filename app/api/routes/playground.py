"""`GET /`: a page on which prompts can be tried out and the compression be seen.

Its files come from the package; the page itself asks the API for everything else.
"""

from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request, Response
from starlette.staticfiles import StaticFiles

from app.api.dependencies import Caller, Parts
from app.api.schemas.playground import PlaygroundConfig, playground_config

FOLDER: Final = Path(__file__).resolve().parents[2] / "web" / "playground"
_METHODS: Final = ["GET", "HEAD"]

#: Files change with the version of the service, and have names that do not: browsers ask each time.
_CACHE_CONTROL: Final = "no-cache"

router = APIRouter(include_in_schema=False)
_files = StaticFiles(directory=FOLDER)


@router.api_route("/", methods=_METHODS)
async def page(request: Request) -> Response:
    """Answer with the page."""
    return await _file("index.html", request)


@router.api_route("/playground/{path:path}", methods=_METHODS)
async def file(path: str, request: Request) -> Response:
    """Answer with what the page is made of."""
    return await _file(path, request)


@router.get("/playground.json")
async def config(parts: Parts, caller: Caller) -> PlaygroundConfig:
    """Answer with what the server takes; 503 while the model loads."""
    del caller  # the page learns here whether it needs a key
    return playground_config(parts.engine_host.engine(), parts.generation.default_compression)


async def _file(path: str, request: Request) -> Response:
    response = await _files.get_response(path, request.scope)
    response.headers["Cache-Control"] = _CACHE_CONTROL
    return response
