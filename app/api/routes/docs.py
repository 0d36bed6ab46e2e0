"""`GET /docs`: the API's description as a page, whose files come from the package."""

from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request, Response
from starlette.staticfiles import StaticFiles

FOLDER: Final = Path(__file__).resolve().parents[2] / "web" / "docs"
_METHODS: Final = ["GET", "HEAD"]
#: Files change with the version of the service, and have names that do not: browsers ask each time.
_CACHE_CONTROL: Final = "no-cache"

router = APIRouter(include_in_schema=False)
_files = StaticFiles(directory=FOLDER)


@router.api_route("/docs", methods=_METHODS)
async def page(request: Request) -> Response:
    """Answer with the page."""
    return await _file("index.html", request)


@router.api_route("/docs/{path:path}", methods=_METHODS)
async def file(path: str, request: Request) -> Response:
    """Answer with what the page is made of."""
    return await _file(path, request)


async def _file(path: str, request: Request) -> Response:
    response = await _files.get_response(path, request.scope)
    response.headers["Cache-Control"] = _CACHE_CONTROL
    return response
