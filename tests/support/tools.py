"""Outside programs that tests call: found by an environment variable or on PATH, or a skip."""

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
