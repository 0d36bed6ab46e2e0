"""Runs `python -m benchmarks`."""

import os
import sys


def main() -> int:
    """Run the command line; see `benchmarks.cli`."""
    # OpenMP reads it when PyTorch is imported, which is why the import comes after: the threads
    # of two processes on one machine would spin against each other (docs/adr/0008).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # noqa: TID251  # before any settings
    from benchmarks.cli import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
