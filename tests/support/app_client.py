"""Ways to talk to an app under test: in the process, and over a real socket."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import httpx
import uvicorn
from fastapi import FastAPI
from starlette.applications import Starlette

from app.main import create_app
from app.settings import Settings
from tests.support.fake_engine import FakeEngine


def settings_for_tests(**values: object) -> Settings:
    """Return settings that the environment has no say in."""
    return Settings(_env_file=None, **values)  # type: ignore[arg-type]  # checked by pydantic


@asynccontextmanager
async def running(app: FastAPI, *, wait_ready: bool = True) -> AsyncIterator[httpx.AsyncClient]:
    """Run an app's lifespan and yield a client that calls it in this process."""
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://app") as client,
    ):
        if wait_ready:
            await until_ready(client)
        yield client


@asynccontextmanager
async def fake_service(engine: FakeEngine, **settings: object) -> AsyncIterator[httpx.AsyncClient]:
    """Serve a fake engine in this process."""
    async with running(create_app(settings_for_tests(**settings), engine)) as client:
        yield client


@asynccontextmanager
async def listening(
    app: Starlette, *, shutdown_timeout_s: int = 5, wait_ready: bool = True
) -> AsyncIterator[str]:
    """Serve an app on a loopback port and yield its URL."""
    config = uvicorn.Config(
        app,
        port=0,
        log_config=None,
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=shutdown_timeout_s,
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    if wait_ready:
        async with httpx.AsyncClient(base_url=url) as client:
            await until_ready(client)
    try:
        yield url
    finally:
        server.should_exit = True
        await serving


@contextmanager
def listening_in_thread(build: Callable[[], Starlette]) -> Iterator[str]:
    """Serve an app from a thread, for callers that block, and yield its URL."""
    found: list[str] = []
    ready, done = threading.Event(), threading.Event()

    async def serve() -> None:
        async with listening(build()) as url:
            found.append(url)
            ready.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    try:
        yield found[0]
    finally:
        done.set()
        thread.join()


async def until_ready(client: httpx.AsyncClient) -> None:
    """Return when the service says that it is ready."""
    async with asyncio.timeout(5):
        status = None
        while status != httpx.codes.OK:
            await asyncio.sleep(0.005)
            status = (await client.get("/health/ready")).status_code


async def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    """Return when `condition` gives something true."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110  # what is waited for knows nothing of the test
            await asyncio.sleep(0.005)
