"""A fake engine, and a client of the service around it."""

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.support.app_client import fake_service
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
