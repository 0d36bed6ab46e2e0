"""Keeps models inside the test process on one CPU thread."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run a test's model on one thread.

    Threads that meet thousands of times a second wait for each other's time slice as soon as
    anything else runs on the machine: tests of seconds then took ten minutes.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
