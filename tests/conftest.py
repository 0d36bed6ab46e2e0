"""What holds for every test: missing hardware or network skips it, tiny models get one thread."""

import functools
from collections.abc import Iterator

import pytest
import torch

from tests.support.tools import network_allowed, threads_per_worker


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests without a CUDA device and `network` tests unless they are allowed."""
    for item in items:
        if item.get_closest_marker("gpu") and not has_cuda():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("network") and not network_allowed():
            item.add_marker(pytest.mark.skip(reason="TEST_NETWORK is not 1"))


@functools.cache
def has_cuda() -> bool:
    """Tell whether a CUDA device can be used."""
    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def one_thread_for_tiny_models(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test's model on one thread; the demo model on all cores that no other worker needs.

    Threads that meet thousands of times a second wait for each other's time slice as soon as
    anything else runs on the machine: tests of seconds then took ten minutes. Two threads also
    need a third more processor time for the demo model's decode steps, and an eighth for reading.
    """
    before = torch.get_num_threads()
    is_demo = request.node.get_closest_marker("demo") is not None
    torch.set_num_threads(threads_per_worker() if is_demo else 1)
    yield
    torch.set_num_threads(before)
