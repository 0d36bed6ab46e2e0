"""Downloads that fail: each failure is one line that names the object, and leaves no model."""

import errno
import json
import os
import threading
from pathlib import Path

import pytest

from app.integrations.aws.weights.cache import WeightsCache
from app.integrations.aws.weights.download import DownloadLimits
from app.integrations.aws.weights.errors import WeightsError
from app.integrations.aws.weights.manifest import MANIFEST_NAME, Manifest
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
)
from tests.support.weights import LIMITS, WEIGHTS, pull, refusal


def test_answer_that_always_breaks_off_is_an_error(
    s3: FakeS3, manifest: Manifest, folder: Path
) -> None:
    """After as many tries as are allowed, by the name of the object."""
    del manifest  # only stored
    s3.fault_of = lambda request: Fault(send_bytes=10) if request.start == 3 * PART_BYTES else None
    assert f"{LOCATION.url_of(WEIGHTS)}: the answer" in refusal(folder)
    assert s3.starts_of(WEIGHTS).count(3 * PART_BYTES) == LIMITS.max_attempts


def test_object_replaced_meanwhile_is_noticed(s3: FakeS3, manifest: Manifest, folder: Path) -> None:
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
        (Fault(status=418, code="an odd secret"), "refused the request (unknown)"),
        (Fault(status=400, code="<b>secret</b>"), "the answer is not one of S3"),
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


def test_object_of_another_size_is_refused(s3: FakeS3, manifest: Manifest, folder: Path) -> None:
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


def test_refused_connection_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nobody on the port."""
    for name, value in s3_environment("http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    text = refusal(folder)
    assert text.startswith(f"{LOCATION.url_of(MANIFEST_NAME)}: AWS cannot be reached")


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
    """A socket's own time limit ends it; it is long enough for answers on a busy machine."""
    del manifest  # only stored
    silence = threading.Event()

    def fall_silent(request: S3Request) -> Fault | None:
        # Of one file: after a whole answer, the next request on its connection would get none.
        is_weights = request.key == LOCATION.key_of(WEIGHTS)
        return Fault(send_bytes=10, hold=silence) if is_weights and request.start == 0 else None

    s3.fault_of = fall_silent
    limits = DownloadLimits(max_attempts=1)
    assert "broke off (ReadTimeoutError)" in refusal(folder, limits, read_timeout_s=2.0)
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


def test_failure_of_one_part_stops_the_others(s3: FakeS3, manifest: Manifest, folder: Path) -> None:
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

    def write(*_: object) -> int:
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


def test_no_key_and_no_signature_is_logged_at_any_level(
    s3: FakeS3, manifest: Manifest, folder: Path
) -> None:
    """The SDK's own debug lines quote signed requests."""
    del s3, manifest  # only stored
    with captured_log("debug") as log:
        pull(folder)
    text = log.getvalue()
    assert "weights_ready" in text
    for word in ("Credential=", "Signature", "tangerine", "Authorization"):
        assert word not in text
