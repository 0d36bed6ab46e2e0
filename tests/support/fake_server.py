"""The real server around a fake engine, in a process: `python -m tests.support.fake_server`.

Arguments: seconds that loading takes, seconds between two tokens. Settings come from the
environment, as for `snapkv serve`.
"""

import sys
import time

from app.cli.server import run_server
from app.settings import load_settings
from snapkv_core import EngineConfig, EngineObserver
from tests.support.fake_engine import FakeBehaviour, FakeEngine


def main(load_s: float, delay_s: float) -> int:
    """Serve until a signal comes; return the exit status."""

    def load(config: EngineConfig, observer: EngineObserver) -> FakeEngine:
        time.sleep(load_s)
        return FakeEngine(config, observer, behaviour=FakeBehaviour(delay_s=delay_s))

    return run_server(load_settings(env_file=None), load)


if __name__ == "__main__":
    sys.exit(main(*map(float, sys.argv[1:])))
