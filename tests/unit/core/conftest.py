"""Keeps tiny models on one CPU thread: their operators are too small to share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread_for_tiny_models(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test on one thread unless it uses the demo model.

    Two threads that meet thousands of times a second wait for each other's time slice as soon as
    anything else runs on the machine; tests of seconds then took ten minutes.
    """
    before = torch.get_num_threads()
    if request.node.get_closest_marker("demo") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
