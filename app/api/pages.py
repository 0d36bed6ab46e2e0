"""Pages whose files come from the package."""

from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request, Response
from starlette.staticfiles import StaticFiles

_WEB: Final = Path(__file__).resolve().parents[1] / "web"
_METHODS: Final = ["GET", "HEAD"]
#: Files change with the version of the service, and have names that do not: browsers ask each time.
_CACHE_CONTROL: Final = "no-cache"


def folder_of(name: str) -> Path:
    """Return where the files of a page lie."""
    return _WEB / name


def page_router(name: str, path: str) -> APIRouter:
    """Return a router that answers with a page, and with its files below `/NAME/`.

    Args:
        name: Folder of the page, in which `index.html` is the page itself.
        path: Where the page is.
    """
    router = APIRouter(include_in_schema=False)
    files = StaticFiles(directory=folder_of(name))

    async def answer(file: str, request: Request) -> Response:
        response = await files.get_response(file, request.scope)
        response.headers["Cache-Control"] = _CACHE_CONTROL
        return response

    @router.api_route(path, methods=_METHODS)
    async def page(request: Request) -> Response:
        return await answer("index.html", request)

    @router.api_route(f"/{name}/{{path:path}}", methods=_METHODS)
    async def part(path: str, request: Request) -> Response:
        return await answer(path, request)

    return router
