"""A fake engine, and a client of the service around it."""

from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from app.main import create_app
from tests.support.app_client import fake_service, listening, settings_for_tests
from tests.support.fake_engine import FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    """Return a fake engine."""
    return FakeEngine()


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """Serve the fake engine."""
    async with fake_service(engine) as client:
        yield client


@pytest.fixture
async def openai_client(engine: FakeEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    """Serve the fake engine on a port to OpenAI's client, which makes connections of its own."""
    async with (
        listening(create_app(settings_for_tests(), engine)) as url,
        openai.AsyncOpenAI(api_key="none", base_url=f"{url}/v1", max_retries=0) as client,
    ):
        yield client
