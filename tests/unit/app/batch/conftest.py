"""A clean place for runs of `snapkv batch`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.logs import captured_log


@pytest.fixture(autouse=True)
def quiet_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Run in an empty folder, without a `.env` file, and leave the process's logging alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("app.cli.batch.command.configure_logging", lambda *_: None)
    with captured_log("warning"):
        yield
