"""The `snapkv` command."""

from app.cli.commands import main

__all__ = ["main"]
