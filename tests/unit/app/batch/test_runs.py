"""A run here: how full it keeps the engine, how it ends, what it tells, which settings count."""

import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from app.cli.batch.errors import BatchStoppedError
from snapkv_core import (
    EngineConfig,
    GenerationRequest,
    ModelLoadError,
    QueueFullError,
    RequestSize,
)
from tests.support.batch import (
    codes_of,
    completion,
    read_results,
    run_here,
    texts_of,
    timeless,
    write_lines,
)
from tests.support.command import Command
from tests.support.fake_engine import FakeBehaviour, FakeEngine, FakeStream

Admit = Callable[[RequestSize], None]


@dataclass
class CountingEngine(FakeEngine):
    """Notes how many requests are in flight at each new one, and refuses what a real one would."""

    in_flight: list[int] = field(default_factory=list)

    async def submit(self, request: GenerationRequest, admit: Admit | None = None) -> FakeStream:
        """Take a request while there is room."""
        if self.num_running >= self.config.max_num_seqs + self.config.max_num_waiting:
            raise QueueFullError(self.num_running, retry_after_s=60.0)
        stream = await super().submit(request, admit)
        self.in_flight.append(self.num_running)
        return stream


def uneven_lines(count: int) -> list[str]:
    """Return lines whose answers have 1 to 7 tokens."""
    return [completion(str(index), "w " * (1 + index % 7)) for index in range(count)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("num_seqs", "num_waiting", "limit"), [(8, 64, 16), (4, 1, 5), (1, 1, 2), (3, 64, 6)]
)
def test_engine_is_kept_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_seqs: int, num_waiting: int, limit: int
) -> None:
    """As many lines wait as run: no token is generated before that many are there, never more."""
    monkeypatch.setenv("SNAPKV_MAX_NUM_SEQS", str(num_seqs))
    monkeypatch.setenv("SNAPKV_MAX_NUM_WAITING", str(num_waiting))
    engine = CountingEngine()
    # The engine stands still while it has fewer, as long as there are lines.
    engine.behaviour.hold = lambda: len(engine.in_flight) < 200 and engine.num_running < limit
    requests, output = write_lines(tmp_path / "in.jsonl", uneven_lines(200)), tmp_path / "out.jsonl"
    assert run_here(engine, requests, output) == 0
    assert max(engine.in_flight) == limit
    assert [result["custom_id"] for result in read_results(output)] == list(map(str, range(200)))


def test_few_results_are_held_for_an_earlier_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One endless answer stops the others after a while, so that memory stays bounded."""
    monkeypatch.setattr("app.cli.batch.runner.MAX_HELD_LINES", 20)
    engine = CountingEngine(behaviour=FakeBehaviour(delay_s=0.002))
    num_begun: list[int] = []
    lines = [completion("slow", "w " * 250), *uneven_lines(300)]
    output = tmp_path / "out.jsonl"

    def watch() -> None:
        while not output.exists() or output.stat().st_size == 0:
            num_begun.append(len(engine.in_flight))
            if ended.wait(0.002):
                return

    ended = threading.Event()
    watching = threading.Thread(target=watch)
    watching.start()
    try:
        assert run_here(engine, write_lines(tmp_path / "in.jsonl", lines), output) == 0
    finally:
        ended.set()
        watching.join()
    assert 20 <= max(num_begun) <= 1 + 20 + 16
    assert len(read_results(output)) == 301


def test_first_signal_lets_what_is_in_flight_finish(tmp_path: Path) -> None:
    """No line is begun after it, and all that were are written; the next run does the rest."""
    engine = CountingEngine(behaviour=FakeBehaviour(delay_s=0.005))
    requests, output = write_lines(tmp_path / "in.jsonl", uneven_lines(60)), tmp_path / "out.jsonl"
    interrupting = threading.Thread(target=interrupt_after, args=(engine, 25))
    interrupting.start()
    assert run_here(engine, requests, output) == 128 + signal.SIGINT
    interrupting.join()
    num_done = len(read_results(output))
    assert 25 <= num_done == len(engine.in_flight) < 60
    assert not engine.aborted
    assert run_here(CountingEngine(), requests, output) == 0
    assert [result["custom_id"] for result in read_results(output)] == list(map(str, range(60)))


def test_second_signal_ends_at_once(tmp_path: Path) -> None:
    """What was written stays."""
    engine = CountingEngine(behaviour=FakeBehaviour(stall_after=3))
    lines = [*uneven_lines(2), *(completion(f"long-{index}", "w " * 9) for index in range(40))]
    requests, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    interrupting = threading.Thread(target=interrupt_after, args=(engine, 18, 2))
    interrupting.start()
    assert run_here(engine, requests, output) == 128 + signal.SIGINT
    interrupting.join()
    assert texts_of(read_results(output)) == [" w", " w w"]
    assert engine.aborted


def interrupt_after(engine: CountingEngine, num_begun: int, num_signals: int = 1) -> None:
    """Send SIGINT to this process once so many lines were begun; then again."""
    pause = threading.Event()
    for _ in range(4_000):
        if len(engine.in_flight) >= num_begun:
            break
        pause.wait(0.002)
    for _ in range(num_signals):
        os.kill(os.getpid(), signal.SIGINT)
        pause.wait(0.2)


def test_engine_that_dies_ends_the_run(tmp_path: Path) -> None:
    """Its lines get no results, for another run can answer them."""

    class DyingEngine(CountingEngine):
        async def submit(
            self, request: GenerationRequest, admit: Admit | None = None
        ) -> FakeStream:
            if len(self.in_flight) >= 30:
                self.is_alive = False
            return await super().submit(request, admit)

    requests, output = write_lines(tmp_path / "in.jsonl", uneven_lines(60)), tmp_path / "out.jsonl"
    with pytest.raises(BatchStoppedError, match="no more lines are taken"):
        run_here(DyingEngine(behaviour=FakeBehaviour(delay_s=0.001)), requests, output)
    results = read_results(output)
    assert 0 < len(results) < 60
    assert set(codes_of(results)) <= {200, 500}
    assert run_here(CountingEngine(), requests, output) in (0, 3)
    assert len(read_results(output)) == 60


def test_line_on_which_the_model_fails_is_a_failed_line(tmp_path: Path) -> None:
    engine = FakeEngine(behaviour=FakeBehaviour(fail_after=3))
    lines = [completion("a", "w"), completion("b", "w " * 5), completion("c", "w")]
    output = tmp_path / "out.jsonl"
    assert run_here(engine, write_lines(tmp_path / "in.jsonl", lines), output) == 3
    assert codes_of(read_results(output)) == [200, 500, 200]


def test_model_that_cannot_be_loaded_ends_the_run(tmp_path: Path) -> None:
    class Broken(FakeEngine):
        def take_over(self, *_: object) -> FakeEngine:
            raise ModelLoadError("no weights here")

    output = tmp_path / "out.jsonl"
    with pytest.raises(ModelLoadError, match="no weights here"):
        run_here(Broken(), write_lines(tmp_path / "in.jsonl", uneven_lines(2)), output)
    assert output.read_bytes() == b""


def test_settings_for_other_peoples_requests_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No key is needed, nothing is written about each line, and a line has all the time."""
    monkeypatch.setenv("SNAPKV_API_KEYS", json.dumps(["0123456789abcdef"]))
    monkeypatch.setenv("SNAPKV_AUTH", "keys")
    monkeypatch.setenv("SNAPKV_TRACING", "otlp")
    monkeypatch.setenv("SNAPKV_REQUEST_LOG_TABLE", "requests")
    requests, output = write_lines(tmp_path / "in.jsonl", uneven_lines(3)), tmp_path / "out.jsonl"
    engine = FakeEngine()
    assert run_here(engine, requests, output) == 0
    assert (
        engine.config.request_timeout_s == EngineConfig(request_timeout_s=86_400).request_timeout_s
    )
    assert capsys.readouterr().out == ""


def test_time_limit_that_is_set_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line over it gets the server's 504."""
    monkeypatch.setenv("SNAPKV_REQUEST_TIMEOUT_S", "0.2")
    engine = FakeEngine(behaviour=FakeBehaviour(stall_after=3))
    lines = [completion("a", "w"), completion("b", "w " * 5)]
    output = tmp_path / "out.jsonl"
    assert run_here(engine, write_lines(tmp_path / "in.jsonl", lines), output) == 3
    assert codes_of(read_results(output)) == [200, 504]


def test_figures_are_those_of_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of earlier runs as well; there is no bar without a terminal, but a line now and then."""
    monkeypatch.setattr("app.cli.batch.figures._LINE_EVERY_S", 0.0)
    knobs = {"max_capacity_prompt": 40, "window_size": 8, "max_tokens": 2}
    lines = [completion("a", "w " * 80, **knobs), "nonsense", completion("b", "w " * 160, **knobs)]
    requests, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    run_here(FakeEngine(), requests, output)
    told = capsys.readouterr().err
    assert "3 lines, 1 failed" in told
    assert "100% of the input" in told
    for part in ("240 read, 4 generated", "3.0 times smaller", "tokens per second"):
        assert part in told
    first = output.read_bytes().splitlines(keepends=True)[0]
    output.write_bytes(first)
    run_here(FakeEngine(), requests, output)
    told = capsys.readouterr().err
    for part in ("3, 1 of them in earlier runs", "240 read, 4 generated", "3.0 times smaller"):
        assert part in told
    assert timeless(output.read_bytes()).startswith(timeless(first))


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--url", "http://x", "--model", "m"], "--model"),
        (["--concurrency", "4"], "--concurrency"),
        (["--url", "http://x", "--concurrency", "0"], "--concurrency"),
        (["--url", "http://x", "--concurrency", "9999"], "--concurrency"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    part: str,
) -> None:
    status, out, err = Command(monkeypatch, capsys)("batch", "in.jsonl", "out.jsonl", *options)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert part in err
