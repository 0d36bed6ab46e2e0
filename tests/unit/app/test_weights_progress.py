"""Counting a transfer, telling of it, and giving it up."""

import io
import json
import threading
from collections.abc import Callable

import pytest
from rich.console import Console

from app.cli.weights import showing_downloads
from app.integrations.aws.weights import progress
from app.integrations.aws.weights.errors import WeightsError
from app.integrations.aws.weights.progress import ProgressLog, StallWatch, Tally, TransferProgress
from app.integrations.aws.workers import run_parallel
from tests.support.logs import captured_log


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        """Stand in for `time.monotonic`."""
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Move the module's time by hand."""
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_counts_of_one_moment(clock: Clock) -> None:
    """What came in vain is received, and not done."""
    tally = Tally(1_000)
    tally.count_found(100)
    tally.count_received(300)
    tally.count_found(-50)
    clock.now_s += 2
    state = tally.snapshot()
    assert (state.total_bytes, state.done_bytes, state.received_bytes) == (1_000, 350, 300)
    assert state.elapsed_s == 2


def test_log_has_a_line_every_few_seconds(clock: Clock) -> None:
    """Not one for each look at the clock."""
    tally, log = Tally(1_000), ProgressLog("s3://weights/x")
    with captured_log() as stream:
        for _ in range(48):
            clock.now_s += 0.25
            tally.count_received(10)
            log.on_progress(tally.snapshot())
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["done_bytes"] for line in lines] == [200, 400]
    assert lines[0]["event"] == "weights_download_progress"
    assert lines[0]["total_bytes"] == 1_000
    assert lines[0]["bytes_per_s"] == 40
    assert lines[0]["source"] == "s3://weights/x"


def test_slow_line_is_given_up_and_slow_disk_is_not(clock: Clock) -> None:
    """Only time in which something is expected from S3 counts."""
    tally = Tally(1 << 30)
    watch = StallWatch(tally, 60, "s3://weights/x")
    clock.now_s += 1_000
    watch.check()
    with tally.waiting_for_s3():
        for _ in range(10):
            clock.now_s += 59
            tally.count_received(1 << 20)
            watch.check()
        for _ in range(59):
            clock.now_s += 1
            tally.count_received(1_000)
            watch.check()
        clock.now_s += 2
        with pytest.raises(WeightsError, match=r"^s3://weights/x: S3 sent 59,000 bytes in 60 s"):
            watch.check()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_terminal_gets_a_bar_and_a_pipe_none(is_terminal: bool) -> None:
    """Elsewhere there are log lines."""
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100)
    with showing_downloads(console) as on_progress:
        on_progress(TransferProgress(2_097_152, 1_048_576, 1_048_576, 1.0))
        on_progress(TransferProgress(2_097_152, 2_097_152, 2_097_152, 2.0))
    shown = console.file.getvalue() if isinstance(console.file, io.StringIO) else ""
    assert ("downloading" in shown, "2.0/2.0 MiB" in shown) == (is_terminal, is_terminal)


def nothing() -> None:
    """Do nothing while waiting."""


def test_every_task_is_done_once() -> None:
    """On as many threads as asked for."""
    done: list[int] = []
    meeting = threading.Barrier(3, timeout=10)

    def work(task: int, stop: threading.Event) -> None:
        assert not stop.is_set()
        meeting.wait()
        done.append(task)

    run_parallel(range(9), work, num_threads=3, on_tick=nothing)
    assert sorted(done) == list(range(9))
    run_parallel([], work, num_threads=3, on_tick=nothing)


def test_first_failure_ends_the_rest() -> None:
    """Those that run are told, those that wait are not begun."""
    begun: list[int] = []
    told = threading.Event()

    def work(task: int, stop: threading.Event) -> None:
        begun.append(task)
        if task == 1:
            raise WeightsError("first")
        if stop.wait(10):
            told.set()

    with pytest.raises(WeightsError, match="first"):
        run_parallel(range(100), work, num_threads=2, on_tick=nothing)
    assert sorted(begun) == [0, 1]
    assert told.wait(10)


@pytest.mark.parametrize("error", [WeightsError("given up"), KeyboardInterrupt()])
def test_whoever_waits_can_end_the_work(error: BaseException) -> None:
    """A watch that gives up, or a user who does."""
    told = threading.Event()

    def work(_: int, stop: threading.Event) -> None:
        if stop.wait(10):
            told.set()

    def give_up() -> None:
        raise error

    ticks: list[Callable[[], None]] = [nothing, give_up]
    with pytest.raises(type(error)):
        run_parallel([1], work, num_threads=1, on_tick=lambda: ticks.pop(0)(), tick_s=0.01)
    assert told.wait(10)
