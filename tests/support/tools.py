"""What the machine gives tests: outside programs, the network, and a share of its cores."""

import os
import shutil

import pytest


def require_tool(name: str, env_var: str | None = None) -> str:
    """Return the path of a program, or skip the test that asks.

    Args:
        name: The program, as on PATH: `terraform`, `redis-server`.
        env_var: Environment variable that may hold its path and wins over PATH.

    Returns:
        Path of an executable file.

    The reason begins with `missing tool:`; .ci/run fails on such a skip, so that a check which
    needs a program cannot silently stop running.
    """
    named = os.environ.get(env_var) if env_var else None
    found = shutil.which(named or name)
    if found is not None:
        return found
    where = f"{env_var}={named} is no executable" if named else f"{name} is not on PATH"
    hint = f" (or name it with {env_var})" if env_var and not named else ""
    pytest.skip(f"missing tool: {where}{hint}")


def network_allowed() -> bool:
    """Tell whether tests may reach other machines."""
    return os.environ.get("TEST_NETWORK") == "1"


def threads_per_worker() -> int:
    """Return how many threads a test may use when all of pytest's workers are busy."""
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return max(1, len(os.sched_getaffinity(0)) // num_workers)
