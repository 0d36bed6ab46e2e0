"""Downloads that succeed, whatever comes in between: parts, retries, repairs, going on."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.integrations.aws.weights.download import DownloadLimits
from app.integrations.aws.weights.errors import WeightsError
from app.integrations.aws.weights.folder import verify_folder
from app.integrations.aws.weights.locks import FileLock
from app.integrations.aws.weights.manifest import MANIFEST_NAME, Manifest
from app.integrations.aws.weights.progress import TransferProgress
from tests.support.logs import captured_log
from tests.support.s3 import LOCATION, PART_BYTES, FakeS3, Fault, S3Request
from tests.support.weights import NUM_PARTS, WEIGHTS, pull, refusal, staging_of


def test_every_file_comes_and_nothing_is_left_beside(
    s3: FakeS3, manifest: Manifest, folder: Path
) -> None:
    """Each part is asked for once; lock and staging folder are gone."""
    states: list[TransferProgress] = []
    assert pull(folder, on_progress=states.append) == manifest
    assert verify_folder(folder) == manifest
    assert sorted(s3.starts_of(WEIGHTS)) == [i * PART_BYTES for i in range(NUM_PARTS)]
    last = states[-1]
    assert last.done_bytes == last.received_bytes == last.total_bytes == manifest.total_bytes
    assert {path.name for path in folder.parent.iterdir()} == {"source", "pulled"}


def test_same_folder_again_fetches_nothing(s3: FakeS3, manifest: Manifest, folder: Path) -> None:
    """It is compared instead; another model's folder is not touched."""
    pull(folder)
    s3.requests.clear()
    assert pull(folder) == manifest
    assert [request.key for request in s3.requests] == [LOCATION.key_of(MANIFEST_NAME)]
    (folder / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match=r"config\.json has 2 bytes"):
        pull(folder)


def test_who_waits_for_another_pull_says_so(manifest: Manifest, folder: Path) -> None:
    """At the level of a terminal, too, where nothing else would tell a wait from a hang."""
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    assert lock.try_acquire(shared=False)
    with captured_log("warning") as log, ThreadPoolExecutor(1) as pool:
        second = pool.submit(pull, folder)
        while not log.getvalue():
            assert not second.done()
            time.sleep(0.01)
        lock.release(remove=True)
        assert second.result(timeout=60) == manifest
    (line,) = [json.loads(line) for line in log.getvalue().splitlines()]
    assert (line["event"], line["lock"]) == ("weights_lock_waited_for", str(folder))


def test_folder_that_holds_something_else_is_not_touched(manifest: Manifest, folder: Path) -> None:
    """Nobody loses what was in it."""
    del manifest  # only stored
    folder.mkdir()
    (folder / "thesis.txt").write_text("x")
    with pytest.raises(WeightsError, match=str(folder)):
        pull(folder)
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]


def test_parts_come_at_once(s3: FakeS3, manifest: Manifest, folder: Path) -> None:
    """As many as are allowed, no more."""
    del manifest  # only stored
    together = threading.Barrier(4, timeout=10)
    num_at_once, most, guard = 0, 0, threading.Lock()

    def meet(request: S3Request) -> None:
        nonlocal num_at_once, most
        if request.start is None or not request.key.endswith(WEIGHTS):
            return
        with guard:
            num_at_once += 1
            most = max(most, num_at_once)
        together.wait()
        with guard:
            num_at_once -= 1

    s3.fault_of = meet
    pull(folder, DownloadLimits(max_parallel=4))
    assert most == 4


@pytest.mark.parametrize("num_broken", [1, 2])
def test_answer_that_breaks_off_is_asked_for_again(
    s3: FakeS3, manifest: Manifest, folder: Path, num_broken: int
) -> None:
    """The line is counted as it was used: bytes that came in vain came all the same."""
    broken: list[int] = []

    def break_off(request: S3Request) -> Fault | None:
        if request.start == 3 * PART_BYTES and len(broken) < num_broken:
            broken.append(1)
            return Fault(send_bytes=50_000)
        return None

    s3.fault_of = break_off
    states: list[TransferProgress] = []
    pull(folder, on_progress=states.append)
    assert verify_folder(folder) == manifest
    assert s3.starts_of(WEIGHTS).count(3 * PART_BYTES) == 1 + num_broken
    assert states[-1].done_bytes == manifest.total_bytes
    assert states[-1].received_bytes >= manifest.total_bytes


def test_corrupt_part_is_fetched_once_more(s3: FakeS3, manifest: Manifest, folder: Path) -> None:
    """One bad part costs one part."""
    seen: list[int] = []

    def flip_once(request: S3Request) -> Fault | None:
        if request.start == 5 * PART_BYTES and not seen:
            seen.append(1)
            return Fault(flip=True)
        return None

    s3.fault_of = flip_once
    with captured_log() as log:
        pull(folder)
    assert verify_folder(folder) == manifest
    assert len(s3.starts_of(WEIGHTS)) == NUM_PARTS + 1
    events = [json.loads(line) for line in log.getvalue().splitlines()]
    (event,) = [event for event in events if event["event"] == "weights_part_corrupt"]
    assert (event["source"], event["start"]) == (LOCATION.url_of(WEIGHTS), 5 * PART_BYTES)


def test_part_that_stays_corrupt_is_an_error_and_the_rest_stays(
    s3: FakeS3, manifest: Manifest, folder: Path
) -> None:
    """It names the object and the bytes; the next attempt fetches what is missing alone."""
    s3.fault_of = lambda request: Fault(flip=True) if request.start == 7 * PART_BYTES else None
    text = refusal(folder, DownloadLimits(max_parallel=1))
    assert text.startswith(f"{LOCATION.url_of(WEIGHTS)}: bytes {7 * PART_BYTES} to ")
    assert "SHA-256" in text
    assert s3.starts_of(WEIGHTS).count(7 * PART_BYTES) == 2
    s3.requests.clear()
    s3.fault_of = lambda _: None
    states: list[TransferProgress] = []
    pull(folder, on_progress=states.append)
    assert verify_folder(folder) == manifest
    assert s3.starts_of(WEIGHTS) == [7 * PART_BYTES]
    assert states[-1].received_bytes == PART_BYTES - 1_000
    assert states[-1].done_bytes == manifest.total_bytes


def test_damage_to_what_has_come_is_repaired(s3: FakeS3, manifest: Manifest, folder: Path) -> None:
    """What is on disk is believed when it hashes right, and not before."""
    s3.fault_of = lambda request: Fault(flip=True) if request.start == 7 * PART_BYTES else None
    refusal(folder, DownloadLimits(max_parallel=1))
    with (staging_of(folder) / WEIGHTS).open("r+b") as file:
        file.seek(2 * PART_BYTES + 7)
        file.write(b"\xff")
    s3.requests.clear()
    s3.fault_of = lambda _: None
    pull(folder)
    assert verify_folder(folder) == manifest
    assert sorted(s3.starts_of(WEIGHTS)) == [2 * PART_BYTES, 7 * PART_BYTES]


def test_other_weights_under_the_same_name_are_begun_anew(
    s3: FakeS3, manifest: Manifest, folder: Path, tmp_path: Path
) -> None:
    """A download of one model is never finished with parts of another."""
    del manifest  # only stored
    s3.fault_of = lambda request: Fault(flip=True) if request.start == 7 * PART_BYTES else None
    refusal(folder, DownloadLimits(max_parallel=1))
    (tmp_path / "source" / "config.json").write_text('{"a": 2}')
    changed = s3.store(tmp_path / "source")
    s3.requests.clear()
    s3.fault_of = lambda _: None
    assert pull(folder) == changed
    assert len(s3.starts_of(WEIGHTS)) == NUM_PARTS
