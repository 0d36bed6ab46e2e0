"""The output: in the order of the input, gone on with by the next run, and never spoilt."""

import fcntl
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.cli.batch.errors import BatchStoppedError
from app.cli.generate import CommandError
from tests.support.batch import (
    completion,
    read_results,
    run_here,
    texts_of,
    timeless,
    write_lines,
)
from tests.support.fake_engine import FakeBehaviour, FakeEngine

LINES = [
    completion("a", "one two"),
    "nonsense",
    completion("b", "three"),
    completion("a", "four"),
    completion("c", "é 日本", max_tokens=10_000),
    completion("d", "five six"),
]


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    """Write an input with good and bad lines."""
    return write_lines(tmp_path / "in.jsonl", LINES)


@pytest.fixture
def whole(requests: Path, tmp_path: Path) -> bytes:
    """Return what one run makes of it."""
    output = tmp_path / "whole.jsonl"
    assert run_here(FakeEngine(), requests, output) == 3
    return output.read_bytes()


def test_results_stand_in_the_order_of_the_input(tmp_path: Path) -> None:
    """Whatever order they end in: the longer the earlier here."""
    engine = FakeEngine(behaviour=FakeBehaviour(delay_s=0.005))
    prompts = [" ".join(["w"] * length) for length in range(30, 0, -1)]
    lines = [completion(f"id-{index}", prompt) for index, prompt in enumerate(prompts)]
    output = tmp_path / "out.jsonl"
    assert run_here(engine, write_lines(tmp_path / "in.jsonl", lines), output) == 0
    results = read_results(output)
    assert [result["custom_id"] for result in results] == [f"id-{index}" for index in range(30)]
    assert texts_of(results) == [f" {prompt}" for prompt in prompts]


def test_run_goes_on_behind_any_byte_of_the_output(
    requests: Path, whole: bytes, tmp_path: Path
) -> None:
    """Wherever it was cut, whole results stay as they are, and the rest follows once."""
    edges = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    cuts = {0, 1, 40, *edges, *(edge - 1 for edge in edges), *(edge + 1 for edge in edges[:-1])}
    for cut in sorted(cuts | set(range(0, len(whole), 211))):
        output = tmp_path / f"cut-{cut}.jsonl"
        output.write_bytes(whole[:cut])
        assert run_here(FakeEngine(), requests, output) == 3
        resumed = output.read_bytes()
        kept = max([0, *(edge for edge in edges if edge <= cut)])
        assert resumed[:kept] == whole[:kept]
        assert timeless(resumed) == timeless(whole)


def test_lines_with_results_are_not_asked_again(
    requests: Path, whole: bytes, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    output.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]))
    engine = FakeEngine()
    run_here(engine, requests, output)
    assert [request.prompt for request in engine.requests] == ["five six"]


def test_complete_output_needs_no_model(requests: Path, whole: bytes, tmp_path: Path) -> None:
    """Its status is that of the run that completed it."""
    engine = FakeEngine()
    output = tmp_path / "whole.jsonl"
    assert run_here(engine, requests, output) == 3
    assert output.read_bytes() == whole
    assert not engine.is_alive
    assert not engine.requests


def test_lines_may_be_added_to_the_input(requests: Path, whole: bytes, tmp_path: Path) -> None:
    """An output that was complete then lacks the new ones only."""
    output = tmp_path / "whole.jsonl"
    write_lines(requests, [*LINES, completion("e", "seven"), completion("d", "again")])
    engine = FakeEngine()
    run_here(engine, requests, output)
    assert output.read_bytes().startswith(whole)
    assert [request.prompt for request in engine.requests] == ["seven"]
    assert read_results(output)[-1]["error"]["code"] == "duplicate_custom_id"


@pytest.mark.parametrize(
    "content",
    [
        b"precious notes without a line end",
        b"precious notes\n",
        b"\n",
        b"{}\n",
        b'{"id":"batch_req_00',
        b'{"id":"batch_req_0123456789abcdef0123456789abcdef","custom_id":"a"}\n',
    ],
)
def test_file_that_is_not_the_output_is_left_alone(
    requests: Path, tmp_path: Path, content: bytes
) -> None:
    output = tmp_path / "out.jsonl"
    output.write_bytes(content)
    with pytest.raises(CommandError, match="is not the output of this input"):
        run_here(FakeEngine(), requests, output)
    assert output.read_bytes() == content


@pytest.mark.parametrize("position", [0, 3, len(LINES) - 1])
def test_output_of_an_input_that_was_changed_is_left_alone(
    requests: Path, whole: bytes, tmp_path: Path, position: int
) -> None:
    """A line that was changed, or is gone, has no result; nothing says which others have one."""
    output = tmp_path / "whole.jsonl"
    changed = [*LINES]
    changed[position] = completion("x", "another")
    for lines in (changed, LINES[:position]):
        write_lines(requests, lines)
        with pytest.raises(CommandError, match="is not the output of this input"):
            run_here(FakeEngine(), requests, output)
        assert output.read_bytes() == whole


def test_files_that_cannot_be_used_are_named(requests: Path, tmp_path: Path) -> None:
    """Before a model is loaded."""
    pipe, output = tmp_path / "pipe", tmp_path / "out.jsonl"
    os.mkfifo(pipe)
    (tmp_path / "linked.jsonl").hardlink_to(requests)
    for given, results, part in (
        (tmp_path / "none.jsonl", output, "none.jsonl: No such file"),
        (tmp_path, output, "must be a file"),
        (pipe, output, "must be a file"),
        (requests, tmp_path, "Is a directory"),
        (requests, pipe, "must be a file"),
        (requests, tmp_path / "none" / "out.jsonl", "No such file"),
        (requests, requests, "two files"),
        (requests, tmp_path / "linked.jsonl", "two files"),
    ):
        with pytest.raises(CommandError, match=part):
            run_here(FakeEngine(), given, results)


def test_two_runs_do_not_write_to_one_output(requests: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with output.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(CommandError, match="another run writes to it"):
            run_here(FakeEngine(), requests, output)
    assert run_here(FakeEngine(), requests, output) == 3


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """Let the kernel refuse whatever would make a file longer, in the middle of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_ends_the_run_and_spoils_nothing(
    requests: Path, whole: bytes, tmp_path: Path
) -> None:
    """The result that had no room is cut off; with room again the run goes on."""
    output = tmp_path / "out.jsonl"
    two_results = b"".join(whole.splitlines(keepends=True)[:2])
    with (
        room_for(len(two_results) + 100),
        pytest.raises(BatchStoppedError, match=r"out\.jsonl: File too large"),
    ):
        run_here(FakeEngine(), requests, output)
    assert timeless(output.read_bytes()) == timeless(two_results)
    run_here(FakeEngine(), requests, output)
    assert timeless(output.read_bytes()) == timeless(whole)


def test_empty_input_gives_an_empty_output(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert run_here(FakeEngine(), write_lines(tmp_path / "in.jsonl", [""]), output) == 0
    assert output.read_bytes() == b""
