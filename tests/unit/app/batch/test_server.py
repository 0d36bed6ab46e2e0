"""A run on a server: its answers, its key, its refusals for now, and how many lines it gets."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from app.main import create_app
from tests.support.app_client import listening_in_thread, settings_for_tests
from tests.support.batch import (
    codes_of,
    completion,
    envelope,
    read_results,
    run_here,
    texts_of,
    timeless,
    write_lines,
)
from tests.support.command import Command
from tests.support.fake_engine import FakeEngine

KEY = "key-of-team-a-0123"


@pytest.fixture
def snapkv(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return the command."""
    return Command(monkeypatch, capsys)


@dataclass
class ScriptedServer:
    """Answers each line as a script says: what comes at its first time, its second, and so on.

    Attributes:
        script: Makes an answer of how many times a prompt was asked for before; None is a 200.
        times: When each prompt was asked for, monotonic seconds.
        most_in_flight: How many requests there were at once.
    """

    script: Callable[[int], Response | None]
    delay_s: float = 0.0
    times: dict[str, list[float]] = field(default_factory=dict)
    num_in_flight: int = 0
    most_in_flight: int = 0

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Serve from a thread and yield the address."""
        routes = [
            Route("/health/ready", self._ok),
            Route("/v1/models", self._ok),
            Route("/v1/completions", self._complete, methods=["POST"]),
        ]
        with listening_in_thread(partial(Starlette, routes=routes)) as url:
            yield url

    async def _ok(self, request: Request) -> Response:
        del request
        return JSONResponse({})

    async def _complete(self, request: Request) -> Response:
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        times = self.times.setdefault((await request.json())["prompt"], [])
        times.append(time.monotonic())
        await asyncio.sleep(self.delay_s)
        self.num_in_flight -= 1
        return self.script(len(times) - 1) or JSONResponse({"usage": {"prompt_tokens": None}})


def test_server_and_process_give_the_same_results(tmp_path: Path, snapkv: Command) -> None:
    lines = [
        completion("a", "one two"),
        "nonsense",
        completion("b", "three", kernel_size=4),
        envelope(custom_id="c", url="/v1/chat/completions", body={"model": "fake"}),
        completion("d", "four"),
    ]
    requests = write_lines(tmp_path / "in.jsonl", lines)
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    run_here(FakeEngine(), requests, here)
    with listening_in_thread(partial(create_app, settings_for_tests(), FakeEngine())) as url:
        status, out, err = snapkv("batch", str(requests), str(there), "--url", f"{url}/")
    assert (status, out) == (3, ""), err
    assert timeless(there.read_bytes()) == timeless(here.read_bytes())


def test_key_comes_from_the_environment_and_a_wrong_one_ends_the_run(
    tmp_path: Path, snapkv: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any line is sent, and without the key in the message."""
    requests, output = write_lines(tmp_path / "in.jsonl", [completion("a", "b")]), tmp_path / "out"
    app = partial(create_app, settings_for_tests(api_keys=[KEY]), FakeEngine())
    with listening_in_thread(app) as url:
        ask = ("batch", str(requests), str(output), "--url", url)
        for wrong in ("", "another-key-0123456"):
            monkeypatch.setenv("SNAPKV_CLIENT_KEY", wrong)
            status, _, err = snapkv(*ask)
            assert status == 1
            assert "refuses the key: a known API key is needed" in err
            assert "another-key" not in err
            assert output.read_bytes() == b""
        monkeypatch.setenv("SNAPKV_CLIENT_KEY", KEY)
        assert snapkv(*ask)[0] == 0
    assert texts_of(read_results(output)) == [" b"]


def test_address_that_is_no_such_server_ends_the_run(tmp_path: Path, snapkv: Command) -> None:
    """It is said at once, and no line becomes an error for it."""
    requests, output = write_lines(tmp_path / "in.jsonl", [completion("a", "b")]), tmp_path / "out"
    with listening_in_thread(partial(create_app, settings_for_tests(), FakeEngine())) as url:
        for address, part in (
            ("http://127.0.0.1:9", "127.0.0.1:9"),
            ("nonsense", "nonsense"),
            (f"{url}/health", "answered with 404"),
        ):
            status, out, err = snapkv("batch", str(requests), str(output), "--url", address)
            assert (status, out) == (1, "")
            assert part in err.splitlines()[-1]
            assert "Traceback" not in err
            assert output.read_bytes() == b""


def refusal(status: int, retry_after: str | None) -> Response:
    """Return a refusal for now."""
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    return JSONResponse({"error": {"message": "later"}}, status_code=status, headers=headers)


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("form", ["seconds", "date"])
def test_refused_line_is_sent_again_after_the_time_it_was_told(
    tmp_path: Path, snapkv: Command, status: int, form: str
) -> None:
    """Each line has one result, of the time when it was taken."""

    def script(num_before: int) -> Response | None:
        # A date has whole seconds, so two of them are at least one.
        date = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
        return refusal(status, {"seconds": "1", "date": date}[form]) if num_before == 0 else None

    server = ScriptedServer(script)
    lines = [completion(prompt, prompt) for prompt in "abc"]
    requests, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    with server.serving() as url:
        assert snapkv("batch", str(requests), str(output), "--url", url)[0] == 0
    assert codes_of(read_results(output)) == [200, 200, 200]
    for first_s, second_s in server.times.values():
        assert second_s - first_s > 0.9


def test_server_that_never_takes_a_line_ends_the_run(
    tmp_path: Path, snapkv: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line gets no result, for it may be answered another day."""
    monkeypatch.setattr("app.cli.batch.service.PATIENCE_S", 0.05)
    monkeypatch.setattr("app.cli.batch.service._FIRST_BACKOFF_S", 0.02)
    server = ScriptedServer(lambda _: refusal(503, None))
    requests, output = write_lines(tmp_path / "in.jsonl", [completion("a", "b")]), tmp_path / "out"
    with server.serving() as url:
        status, _, err = snapkv("batch", str(requests), str(output), "--url", url)
    assert status == 1
    assert "no more lines are taken: later" in err
    assert output.read_bytes() == b""
    assert len(server.times["b"]) > 1


def always(response: Response) -> Callable[[int], Response]:
    """Return a script of one answer."""
    return lambda _: response


def test_other_refusals_are_results(tmp_path: Path, snapkv: Command) -> None:
    """Nobody asks twice for what will be refused twice; an answer that is no JSON is told apart."""
    for response, code in (
        (JSONResponse({"error": {}}, status_code=400), 400),
        (JSONResponse({"error": {}}, status_code=504), 504),
        (PlainTextResponse("<html>", status_code=500), "no_json_answer"),
        (JSONResponse([1]), "no_json_answer"),
    ):
        server = ScriptedServer(always(response))
        requests = write_lines(tmp_path / "in.jsonl", [completion("a", "b")])
        output = tmp_path / f"out-{response.status_code}.jsonl"
        with server.serving() as url:
            assert snapkv("batch", str(requests), str(output), "--url", url)[0] == 3
        assert codes_of(read_results(output)) == [code]
        assert len(server.times["b"]) == 1


def test_server_gets_as_many_lines_at_once_as_it_is_to(tmp_path: Path, snapkv: Command) -> None:
    server = ScriptedServer(lambda _: None, delay_s=0.02)
    lines = [completion(str(index), str(index)) for index in range(40)]
    requests, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    with server.serving() as url:
        options: list[Any] = ["--url", url, "--concurrency", "5"]
        assert snapkv("batch", str(requests), str(output), *options)[0] == 0
    assert server.most_in_flight == 5
    assert Counter(map(len, server.times.values())) == {1: 40}
    assert [result["custom_id"] for result in read_results(output)] == list(map(str, range(40)))
