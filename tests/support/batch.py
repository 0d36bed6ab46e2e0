"""Inputs and outputs of `snapkv batch`, and runs of it in the test's process on a fake engine."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from app.cli.batch.command import BatchOptions, run_batch
from tests.support.fake_engine import FakeEngine

_CREATED: Final = re.compile(rb'"created":\d+')


def completion(custom_id: str, prompt: str, **fields: Any) -> str:
    """Return a line that asks the fake to echo a prompt."""
    body = {"model": "fake", "prompt": prompt, "temperature": 0, **fields}
    return envelope(custom_id=custom_id, body=body)


def envelope(**fields: Any) -> str:
    """Return a line with whatever differs from a request that is well addressed."""
    return json.dumps({"method": "POST", "url": "/v1/completions", **fields})


def write_lines(path: Path, lines: Iterable[str]) -> Path:
    """Write an input."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def read_results(path: Path) -> list[dict[str, Any]]:
    """Read an output."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def texts_of(results: Iterable[dict[str, Any]]) -> list[str]:
    """Return the answers' texts; every line must have one."""
    return [result["response"]["body"]["choices"][0]["text"] for result in results]


def codes_of(results: Iterable[dict[str, Any]]) -> list[str | int]:
    """Return the status of each line that was answered, and the code of each that was not."""
    return [
        result["error"]["code"] if result["response"] is None else result["response"]["status_code"]
        for result in results
    ]


def timeless(output: bytes) -> bytes:
    """Return an output without the seconds at which its lines were answered."""
    return _CREATED.sub(b'"created":0', output)


def run_here(
    engine: FakeEngine, requests: Path, results: Path, options: Sequence[object] = ()
) -> int:
    """Run a batch on a fake engine; return the exit status."""
    return run_batch(BatchOptions(requests, results, *options), engine.take_over)  # type: ignore[arg-type]
