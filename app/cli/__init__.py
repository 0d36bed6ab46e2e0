"""The `snapkv` command."""

import os


def main() -> None:
    """Run the command line; see `app.cli.commands`."""
    # OpenMP's threads spin while they wait for each other, so that two busy processes on one
    # machine slow each other down tenfold and more (docs/adr/0008). It reads this when PyTorch is
    # imported, which is why the import comes after.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from app.cli.commands import run

    run()
