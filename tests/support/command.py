"""Runs the `snapkv` command in the test's process."""

import io
import sys
from types import SimpleNamespace

import pytest

from app.cli import commands


class Command:
    """Runs the command in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        """Return exit status, standard output and standard error."""
        self._monkeypatch.setattr(sys, "argv", ["snapkv", *arguments])
        self._monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as ended:
            commands.run()
        status = ended.value.code or 0
        assert isinstance(status, int)
        printed = self._capsys.readouterr()
        return status, printed.out, printed.err
