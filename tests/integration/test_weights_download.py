"""Downloads from a server that fails in every way: what is retried, what is told, what stays."""

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.integrations.aws.weights.cache import WeightsCache
from app.integrations.aws.weights.download import DownloadLimits
from app.integrations.aws.weights.errors import WeightsError
from app.integrations.aws.weights.folder import verify_folder
from app.integrations.aws.weights.manifest import MANIFEST_NAME, Manifest
from app.integrations.aws.weights.progress import TransferProgress
from app.integrations.aws.weights.pull import Puller
from tests.support.logs import captured_log
from tests.support.s3 import (
    LOCATION,
    PART_BYTES,
    FakeS3,
    Fault,
    S3Request,
    client_maker,
    s3_environment,
    serving_s3,
)

WEIGHTS = "model.safetensors"
NUM_PARTS = 8
LIMITS = DownloadLimits(max_parallel=4, max_attempts=3, retry_delay_s=0.001)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    """Serve a fake S3 that the SDK talks to."""
    fake = FakeS3()
    with serving_s3(fake) as url:
        for name, value in s3_environment(url).items():
            monkeypatch.setenv(name, value)
        yield fake


@pytest.fixture
def manifest(s3: FakeS3, tmp_path: Path) -> Manifest:
    """Store a model of eight parts, the last one short, and two small files."""
    folder = tmp_path / "source"
    folder.mkdir()
    content = b"".join(bytes([i]) * PART_BYTES for i in range(NUM_PARTS))
    (folder / WEIGHTS).write_bytes(content[:-1_000])
    (folder / "config.json").write_text('{"a": 1}')
    (folder / "empty.txt").write_bytes(b"")
    return s3.store(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder that does not exist."""
    return tmp_path / "pulled"


def pull(
    folder: Path,
    limits: DownloadLimits = LIMITS,
    on_progress: Callable[[TransferProgress], None] = lambda _: None,
    **client: Any,
) -> Manifest:
    """Pull the model into a folder."""
    puller = Puller(on_progress, create_client=client_maker(**client), limits=limits)
    return puller.to_folder(LOCATION, folder)


def refusal(folder: Path, limits: DownloadLimits = LIMITS, **client: Any) -> str:
    """Return the one line with which a pull fails; it leaves no folder."""
    with pytest.raises(WeightsError) as refused:
        pull(folder, limits, **client)
    assert not folder.exists()
    text = str(refused.value)
    assert "\n" not in text
    assert "secret" not in text
    return text


def staging_of(folder: Path) -> Path:
    """Return where a pull into a folder keeps what has come."""
    return folder.with_name(f".{folder.name}.partial")


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


def test_folder_that_holds_something_else_is_not_touched(
    manifest: Manifest, folder: Path
) -> None:
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


def test_answer_that_always_breaks_off_is_an_error(
    s3: FakeS3, manifest: Manifest, folder: Path
) -> None:
    """After as many tries as are allowed, by the name of the object."""
    del manifest  # only stored
    s3.fault_of = lambda request: (
        Fault(send_bytes=10) if request.start == 3 * PART_BYTES else None
    )
    assert f"{LOCATION.url_of(WEIGHTS)}: the answer" in refusal(folder)
    assert s3.starts_of(WEIGHTS).count(3 * PART_BYTES) == LIMITS.max_attempts


def test_corrupt_part_is_fetched_once_more(
    s3: FakeS3, manifest: Manifest, folder: Path
) -> None:
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


def test_damage_to_what_has_come_is_repaired(
    s3: FakeS3, manifest: Manifest, folder: Path
) -> None:
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


def test_object_replaced_meanwhile_is_noticed(
    s3: FakeS3, manifest: Manifest, folder: Path
) -> None:
    """Even by one of the same size: no mixture of two versions is ever put together."""
    del manifest  # only stored
    key = LOCATION.key_of(WEIGHTS)

    def replace(request: S3Request) -> None:
        if request.start == 2 * PART_BYTES:
            s3.objects[key] = b"\0" * len(s3.objects[key])

    s3.fault_of = replace
    text = refusal(folder, DownloadLimits(max_parallel=1))
    assert text.startswith(f"{LOCATION.url_of(WEIGHTS)}: was replaced")


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        (Fault(status=403, code="AccessDenied"), "access is denied (AccessDenied)"),
        (Fault(status=404, code="NoSuchKey"), "`snapkv weights push` writes it"),
        (Fault(status=404, code="NoSuchBucket"), "bucket does not exist"),
        (Fault(status=403, code="ExpiredToken"), "credentials are refused"),
        (Fault(status=503, code="SlowDown"), "fewer requests"),
        (Fault(status=500, code="InternalError"), "InternalError"),
        (Fault(status=418, code="odd <b>secret</b>\n"), "refused"),
        (Fault(send_bytes=10), "broke off"),
    ],
)
def test_failures_at_the_manifest_are_one_line(
    s3: FakeS3, manifest: Manifest, folder: Path, fault: Fault, part: str
) -> None:
    """Each names the object and what is the matter, in our words."""
    del manifest  # only stored
    s3.fault_of = lambda _: fault
    text = refusal(folder)
    assert text.startswith(f"{LOCATION.url_of(MANIFEST_NAME)}: ")
    assert part in text


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        (Fault(status=403, code="AccessDenied"), "access is denied"),
        (Fault(status=404, code="NoSuchKey"), "does not exist"),
    ],
)
def test_failures_at_a_file_are_one_line(
    s3: FakeS3, manifest: Manifest, folder: Path, fault: Fault, part: str
) -> None:
    """Before any file is fetched."""
    del manifest  # only stored
    s3.fault_of = lambda request: fault if request.key.endswith(WEIGHTS) else None
    text = refusal(folder)
    assert text.startswith(f"{LOCATION.url_of(WEIGHTS)}: ")
    assert part in text
    assert s3.starts_of("config.json") == []


def test_object_of_another_size_is_refused(
    s3: FakeS3, manifest: Manifest, folder: Path
) -> None:
    """A manifest whose files are not there is told apart from a bad line."""
    del manifest  # only stored
    s3.objects[LOCATION.key_of("config.json")] = b"{}"
    assert refusal(folder).endswith("config.json: has 2 bytes, the manifest says 8")


def test_server_that_ignores_ranges_is_refused(
    s3: FakeS3, manifest: Manifest, folder: Path
) -> None:
    """Its whole object is not read for a part."""
    del manifest  # only stored
    s3.fault_of = lambda request: Fault(ignore_range=True) if request.start else None
    assert "asked for bytes=" in refusal(folder)


def test_manifest_that_contradicts_itself_is_an_error(
    s3: FakeS3, manifest: Manifest, folder: Path
) -> None:
    """Right parts do not make up for a wrong whole."""
    stored = json.loads(manifest.canonical)
    for file in stored["files"]:
        if file["name"] == WEIGHTS:
            file["sha256"] = "0" * 64
    s3.objects[LOCATION.key_of(MANIFEST_NAME)] = json.dumps(stored).encode()
    assert f"{LOCATION.url_of(WEIGHTS)}: " in refusal(folder)


def test_hostile_manifest_is_refused_before_anything_is_fetched(
    s3: FakeS3, manifest: Manifest, folder: Path, tmp_path: Path
) -> None:
    """Whoever can write the bucket cannot write elsewhere on this machine."""
    stored = json.loads(manifest.canonical)
    stored["files"][0]["name"] = "../../evil.json"
    s3.objects[LOCATION.key_of(MANIFEST_NAME)] = json.dumps(stored).encode()
    assert "evil.json" in refusal(folder)
    assert len(s3.requests) == 1
    assert not list(tmp_path.rglob("evil.json"))


def test_refused_connection_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nobody on the port."""
    for name, value in s3_environment("http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    text = refusal(folder)
    assert text.startswith(f"{LOCATION.url_of(MANIFEST_NAME)}: S3 cannot be reached")


def test_missing_credentials_are_one_line(
    s3: FakeS3, manifest: Manifest, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual first mistake."""
    del s3, manifest  # only stored
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "no usable AWS credentials" in refusal(folder)


def test_bad_endpoint_is_one_line_without_its_password(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the SDK says of it is not repeated."""
    for name, value in s3_environment("user:secret@nowhere").items():
        monkeypatch.setenv(name, value)
    assert "AWS configuration" in refusal(folder)


def test_silent_server_is_given_up(s3: FakeS3, manifest: Manifest, folder: Path) -> None:
    """A socket's own time limit ends it."""
    del manifest  # only stored
    silence = threading.Event()
    s3.fault_of = lambda request: (
        Fault(send_bytes=10, hold=silence) if request.start == 0 else None
    )
    limits = DownloadLimits(max_attempts=1)
    assert "broke off (ReadTimeoutError)" in refusal(folder, limits, read_timeout_s=0.2)
    silence.set()


@pytest.mark.parametrize("name", [MANIFEST_NAME, WEIGHTS])
def test_server_that_trickles_is_given_up(
    s3: FakeS3, manifest: Manifest, folder: Path, name: str
) -> None:
    """It is never silent for long, and would take for ever."""
    del manifest  # only stored
    s3.fault_of = lambda request: (
        Fault(trickle=True) if request.key.endswith(name) and request.method == "GET" else None
    )
    assert "was given up" in refusal(folder, DownloadLimits(stall_timeout_s=0.3))


def test_failure_of_one_part_stops_the_others(
    s3: FakeS3, manifest: Manifest, folder: Path
) -> None:
    """Nothing further is asked for once it is known that it is in vain."""
    del manifest  # only stored
    s3.fault_of = lambda request: (
        Fault(status=403, code="AccessDenied") if request.start == 0 else None
    )
    refusal(folder, DownloadLimits(max_parallel=1))
    assert [request.start for request in s3.requests if request.start is not None] == [0]


def test_disk_that_fills_up_is_one_line(
    s3: FakeS3, manifest: Manifest, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have taken the room that was there."""
    del s3, manifest  # only stored

    def write(descriptor: int, data: bytes, position: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", write)
    assert "No space left on device" in refusal(folder)


def test_cache_folder_that_cannot_be_made_is_one_line(
    s3: FakeS3, manifest: Manifest, tmp_path: Path
) -> None:
    """The path is what has to be changed."""
    del s3, manifest  # only stored
    (tmp_path / "file").write_text("")
    puller = Puller(lambda _: None, create_client=client_maker())
    with pytest.raises(WeightsError, match=f"{tmp_path}/file/cache: Not a directory"):
        puller.to_cache(LOCATION, WeightsCache(tmp_path / "file" / "cache", None))
