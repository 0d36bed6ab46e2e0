"""Push, pull and serve through moto's S3, with the real loader at the end."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.cli import commands
from app.integrations.aws.weights.cache import WeightsCache
from app.integrations.aws.weights.errors import WeightsError
from app.integrations.aws.weights.folder import verify_folder
from app.integrations.aws.weights.location import S3Location
from app.integrations.aws.weights.manifest import MANIFEST_NAME, PART_BYTES
from app.integrations.aws.weights.models import S3Models
from app.integrations.aws.weights.pull import Puller
from app.integrations.aws.weights.push import Pusher
from snapkv_core import Engine, EngineConfig
from tests.support.engines import ask
from tests.support.logs import captured_log
from tests.support.models import build_model, random_prompt, write_model_folder
from tests.support.s3 import (
    BUCKET,
    LOCATION,
    client_maker,
    ignore_progress,
    moto_server,
    s3_environment,
)

WEIGHTS_KEY = LOCATION.key_of("model.safetensors")
MANIFEST_KEY = LOCATION.key_of(MANIFEST_NAME)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Run moto once for all tests of this file."""
    with moto_server() as url:
        yield url


@pytest.fixture
def client(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a client of an empty bucket; settings of the caller's shell are hidden."""
    for name, value in s3_environment(server).items():
        monkeypatch.setenv(name, value)
    client = client_maker()(8)
    client.create_bucket(Bucket=BUCKET)
    yield client
    for key in keys_in(client):
        client.delete_object(Bucket=BUCKET, Key=key)
    client.delete_bucket(Bucket=BUCKET)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a folder that may be stored; its weights are more than one part."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights" * (PART_BYTES // 7) + b"w" * 1_000)
    (model / "config.json").write_text("{}")
    return model


def keys_in(client: Any) -> list[str]:
    """List the bucket."""
    answer = client.list_objects_v2(Bucket=BUCKET)
    return sorted(entry["Key"] for entry in answer.get("Contents", []))


def record_writes(client: Any) -> list[tuple[str, str]]:
    """Note every request of a client that changes something, by operation and key."""
    writes: list[tuple[str, str]] = []

    def note(model: Any, params: Any, **_: Any) -> None:
        if model.name not in ("HeadObject", "ListObjectsV2"):
            writes.append((model.name, params["url_path"].removeprefix("/")))

    client.meta.events.register("before-call.s3", note)
    return writes


def push(client: Any, folder: Path) -> str:
    """Push a folder and return its fingerprint."""
    pusher = Pusher(client, folder, LOCATION)
    plan = pusher.plan()
    pusher.push(plan)
    return plan.manifest.fingerprint


def test_what_is_pushed_is_pulled(client: Any, folder: Path, tmp_path: Path) -> None:
    """Byte for byte, in several parts, under one fingerprint."""
    fingerprint = push(client, folder)
    assert keys_in(client) == [LOCATION.key_of("config.json"), WEIGHTS_KEY, MANIFEST_KEY]
    puller = Puller(ignore_progress, create_client=client_maker())
    manifest = puller.to_folder(LOCATION, tmp_path / "pulled")
    assert manifest.fingerprint == fingerprint
    assert verify_folder(tmp_path / "pulled") == manifest
    found = (tmp_path / "pulled" / "model.safetensors").read_bytes()
    assert found == (folder / "model.safetensors").read_bytes()


def test_manifest_is_written_last(client: Any, folder: Path) -> None:
    """Large files go in parts; a reader who sees the manifest finds all of them."""
    writes = record_writes(client)
    push(client, folder)
    names = [name for name, _ in writes]
    assert names.count("UploadPart") == 2
    assert writes[-1] == ("PutObject", MANIFEST_KEY)
    assert [key for _, key in writes].count(MANIFEST_KEY) == 1


def test_second_push_sends_nothing(client: Any, folder: Path) -> None:
    """Size and hash of every object are as they should be."""
    push(client, folder)
    writes = record_writes(client)
    push(client, folder)
    assert writes == []


def test_changed_file_alone_is_sent_while_no_manifest_is_there(client: Any, folder: Path) -> None:
    """The old manifest goes first: it names a file that is about to change."""
    before = push(client, folder)
    (folder / "config.json").write_text("[]")
    writes = record_writes(client)
    assert push(client, folder) != before
    config_key = LOCATION.key_of("config.json")
    assert writes == [
        ("DeleteObject", MANIFEST_KEY),
        ("PutObject", config_key),
        ("PutObject", MANIFEST_KEY),
    ]


def test_lost_object_is_sent_again(client: Any, folder: Path) -> None:
    """Also one of another size, or without our metadata."""
    push(client, folder)
    client.delete_object(Bucket=BUCKET, Key=LOCATION.key_of("config.json"))
    client.put_object(Bucket=BUCKET, Key=WEIGHTS_KEY, Body=b"other")
    plan = Pusher(client, folder, LOCATION).plan()
    assert [file.name for file in plan.uploads] == ["config.json", "model.safetensors"]
    client.put_object(Bucket=BUCKET, Key=LOCATION.key_of("config.json"), Body=b"{}")
    plan = Pusher(client, folder, LOCATION).plan()
    assert [file.name for file in plan.uploads] == ["config.json", "model.safetensors"]


def test_file_that_changes_while_it_is_sent_leaves_no_manifest(client: Any, folder: Path) -> None:
    """What was hashed is not what was sent."""
    pusher = Pusher(client, folder, LOCATION)
    plan = pusher.plan()
    (folder / "config.json").write_text("[]")
    with pytest.raises(WeightsError, match="changed while it was pushed"):
        pusher.push(plan)
    assert MANIFEST_KEY not in keys_in(client)


def test_push_to_a_missing_bucket_is_one_line(client: Any, folder: Path) -> None:
    """It names what could not be stored."""
    pusher = Pusher(client, folder, S3Location("no-such-bucket", "x"))
    with pytest.raises(WeightsError, match=r"^s3://no-such-bucket/x/[^\n]*NoSuchBucket"):
        pusher.push(pusher.plan())


def test_pull_of_a_replaced_file_fails(client: Any, folder: Path, tmp_path: Path) -> None:
    """By its content, when size and all else agree."""
    push(client, folder)
    client.put_object(Bucket=BUCKET, Key=LOCATION.key_of("config.json"), Body=b"[]")
    puller = Puller(ignore_progress, create_client=client_maker())
    with pytest.raises(WeightsError, match=r"config\.json: bytes 0 to 1 have another SHA-256"):
        puller.to_folder(LOCATION, tmp_path / "pulled")


class Command:
    """Runs `snapkv weights` in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, list[str], str]:
        """Return exit status, lines of standard output, and standard error."""
        self._monkeypatch.setattr(sys, "argv", ["snapkv", "weights", *arguments])
        with pytest.raises(SystemExit) as ended:
            commands.run()
        printed = self._capsys.readouterr()
        status = ended.value.code or 0
        assert isinstance(status, int)
        return status, printed.out.splitlines(), printed.err


@pytest.fixture
def weights(
    client: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Iterator[Command]:
    """Return the command, with a cache of its own; it leaves the process's logging alone."""
    del client  # the bucket
    monkeypatch.setattr("app.cli.weights.configure_logging", lambda *_: None)
    monkeypatch.setenv("SNAPKV_WEIGHTS_CACHE_DIR", str(tmp_path / "cache"))
    with captured_log():
        yield Command(monkeypatch, capsys)


def test_commands_push_pull_and_verify(
    weights: Command, client: Any, folder: Path, tmp_path: Path
) -> None:
    """What they print on standard output can be read by a script."""
    url = str(LOCATION)
    status, planned, _ = weights("push", str(folder), url, "--dry-run")
    assert status == 0
    assert planned[0] == f"would upload {url}/config.json (2 bytes)"
    assert keys_in(client) == []
    status, pushed, _ = weights("push", str(folder), url)
    assert (status, pushed[-1]) == (0, planned[-1])
    status, again, _ = weights("push", str(folder), url)
    assert (status, again[0]) == (0, "2 files are there already")
    fingerprint = pushed[-1].removeprefix("weights_fingerprint ")
    status, pulled, _ = weights("pull", url)
    assert (status, pulled) == (0, [str(tmp_path / "cache" / fingerprint), pushed[-1]])
    status, named, _ = weights("pull", url, "--to", str(tmp_path / "own"))
    assert (status, named) == (0, [str(tmp_path / "own"), pushed[-1]])
    status, verified, _ = weights("verify", str(tmp_path / "own"))
    assert (status, verified[-1]) == (0, pushed[-1])


def test_failing_commands_print_one_line(weights: Command, folder: Path, tmp_path: Path) -> None:
    """1 is a failure, 2 is wrong use."""
    for arguments, status, part in (
        (["pull", str(LOCATION)], 1, f"{MANIFEST_NAME}: does not exist (NoSuchKey)"),
        (["pull", "weights/x"], 2, "s3://bucket/prefix"),
        (["push", str(folder), "s3://no-such-bucket/x"], 1, "NoSuchBucket"),
        (["push", str(tmp_path / "nowhere"), str(LOCATION)], 1, "No such file"),
        (["verify", str(folder)], 1, MANIFEST_NAME),
    ):
        found, _, err = weights(*arguments)
        assert found == status
        assert part in err.splitlines()[-1]
        assert err.splitlines()[-1].startswith("error: ")
        assert "Traceback" not in err


@pytest.mark.slow
def test_model_from_s3_answers_like_the_folder_it_was_pushed_from(
    client: Any, tmp_path: Path
) -> None:
    """Pushed, pulled into an empty cache, loaded by the real loader, asked."""
    folder = write_model_folder(tmp_path / "tiny-model", build_model("llama", 2, seed=41))
    push(client, folder)
    models = S3Models(
        WeightsCache(tmp_path / "cache", None),
        Puller(ignore_progress, create_client=client_maker()),
    )
    config = EngineConfig(model=str(LOCATION), device="cpu", dtype="float32")
    local = models.localise(config)
    assert models.localise(EngineConfig(model="owner/name")) == EngineConfig(model="owner/name")
    engine = Engine.load(local)
    assert engine.spec.name == "tiny"
    own = Engine.load(EngineConfig(model=str(folder), device="cpu", dtype="float32"))
    prompt = random_prompt(70, seed=1)
    answers = [ask(e, prompt, max_new_tokens=24, ignore_eos=True) for e in (engine, own)]
    assert answers[0].token_ids == answers[1].token_ids
    assert len(answers[0].token_ids[0]) == 24
    named = models.localise(
        EngineConfig(model=str(LOCATION), served_model_name="mine", revision="x")
    )
    assert (named.served_model_name, named.model, named.revision) == ("mine", local.model, None)
    models.release()
