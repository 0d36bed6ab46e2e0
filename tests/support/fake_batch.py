"""`snapkv batch` on a fake engine, in a process: `python -m tests.support.fake_batch`.

Arguments: input, output, seconds between two tokens. Settings come from the environment.
"""

import sys
from pathlib import Path

from tests.support.batch import run_here
from tests.support.fake_engine import FakeBehaviour, FakeEngine


def main(requests: str, results: str, delay_s: str) -> int:
    """Run the batch; return the exit status."""
    engine = FakeEngine(behaviour=FakeBehaviour(delay_s=float(delay_s)))
    return run_here(engine, Path(requests), Path(results))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
