"""A real headless browser for tests of pages; it reaches nothing but this machine."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from playwright.async_api import Browser, ConsoleMessage, Page, Request, async_playwright

from tests.support.tools import require_tool

#: Long enough for a machine that is busy with other tests.
PATIENCE_MS = 30_000


@asynccontextmanager
async def headless_browser() -> AsyncIterator[Browser]:
    """Start the system's Chromium, or skip the test where there is none."""
    path = require_tool("chromium", "CHROMIUM")
    # Its sandbox refuses to run as root, and containers have little shared memory.
    flags = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=flags)
        try:
            yield browser
        finally:
            await browser.close()


class WatchedPage:
    """A page, with what it asked for and what it complained about.

    Attributes:
        page: The page.
        requests: Addresses that it asked for.
        complaints: Errors in its console and exceptions that nobody caught.
    """

    def __init__(self, page: Page) -> None:
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("request", self._note_request)
        page.on("console", self._note_message)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def strangers(self) -> set[str]:
        """Hosts that it asked which are not the page's own."""
        own = urlsplit(self.page.url).netloc
        asked = {urlsplit(url).netloc for url in self.requests if not url.startswith("data:")}
        return asked - {own}

    def _note_request(self, request: Request) -> None:
        self.requests.append(request.url)

    def _note_message(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


@asynccontextmanager
async def opened(browser: Browser, url: str, **context: Any) -> AsyncIterator[WatchedPage]:
    """Open an address in a fresh profile with these settings of the browser's context."""
    profile = await browser.new_context(**context)
    try:
        watched = WatchedPage(await profile.new_page())
        await watched.page.goto(url)
        yield watched
    finally:
        await profile.close()
