"""A browser for all tests of a file, and a server around a fake engine for each of them."""

from collections.abc import AsyncIterator

import pytest_asyncio
from playwright.async_api import Browser

from tests.support.browser import headless_browser
from tests.support.playground import Served, serving_fake


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """Start one browser for all tests."""
    async with headless_browser() as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="module")
async def served(browser: Browser) -> AsyncIterator[Served]:
    """Serve without keys."""
    async with serving_fake(browser) as served:
        yield served
