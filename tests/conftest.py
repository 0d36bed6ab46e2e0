"""What holds for every test: those whose hardware or network is not there are skipped."""

import functools

import pytest
import torch

from tests.support.tools import network_allowed


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
