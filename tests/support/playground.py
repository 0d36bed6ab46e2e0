"""A fake engine's server, the browser that visits its playground, and what a visitor does there."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from playwright.async_api import Browser, Page, expect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.main import create_app
from tests.support.app_client import listening, settings_for_tests
from tests.support.browser import PATIENCE_MS, WatchedPage, opened
from tests.support.fake_engine import FakeEngine

PROMPT = " ".join(f"word{index}" for index in range(60))
KNOBS: dict[str, Any] = {"max_capacity_prompt": 16, "window_size": 4, "kernel_size": 3}
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'"
)

expect.set_options(timeout=PATIENCE_MS)


class StrictPolicy:
    """Adds the strictest policy that the page has to live with."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""

        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"].append((b"content-security-policy", POLICY))
            await send(message)

        await self._app(scope, receive, send_with_policy)


@dataclass(frozen=True, slots=True)
class Served:
    """A server around a fake engine, and the browser that visits it."""

    url: str
    engine: FakeEngine
    browser: Browser

    def visit(self, **context: Any) -> AbstractAsyncContextManager[WatchedPage]:
        """Open the page in a fresh profile."""
        return opened(self.browser, f"{self.url}/", **context)


@asynccontextmanager
async def serving_fake(browser: Browser, **settings: Any) -> AsyncIterator[Served]:
    """Serve a fake engine of its own to a test."""
    engine = FakeEngine()
    app: FastAPI = create_app(settings_for_tests(**settings), engine)
    app.add_middleware(StrictPolicy)
    async with listening(app, shutdown_timeout_s=1) as url:
        yield Served(url, engine, browser)


async def fill(page: Page, prompt: str = PROMPT, **knobs: Any) -> None:
    """Write a prompt and the first budget's knobs."""
    await page.fill("#prompt", prompt)
    for name, value in {**KNOBS, **knobs}.items():
        await page.fill(f"#{name}-a", str(value))


async def run(page: Page) -> None:
    """Press Run and wait for the end."""
    await page.click("#run")
    await expect(page.locator(".panel-state").first).to_contain_text("Finished")
