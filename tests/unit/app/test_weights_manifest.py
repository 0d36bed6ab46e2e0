"""The manifest of weights in S3: its fingerprint, and everything that it may not name."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from app.integrations.aws.weights.errors import WeightsError
from app.integrations.aws.weights.folder import (
    build_manifest,
    list_model_files,
    verify_folder,
)
from app.integrations.aws.weights.location import S3Location
from app.integrations.aws.weights.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    Manifest,
    parse_manifest,
)
from snapkv_core import InvalidParameterError

PART = 1 << 16
SHA = "0" * 64


def entry(name: str = "model.safetensors", size: Any = 1, **changes: Any) -> dict[str, Any]:
    """Describe a file as a manifest does."""
    num_parts = -(-size // PART) if isinstance(size, int) and 0 < size < 1 << 32 else 0
    return {"name": name, "size": size, "sha256": SHA, "parts": [SHA] * num_parts, **changes}


def parse(*files: dict[str, Any], **changes: Any) -> Manifest:
    """Parse a manifest of some files."""
    whole = {"version": 1, "part_size": PART, "files": list(files), **changes}
    return parse_manifest(json.dumps(whole).encode(), "here")


def refusal(*files: dict[str, Any], **changes: Any) -> str:
    """Return the one line with which a manifest is refused."""
    with pytest.raises(WeightsError) as refused:
        parse(*files, **changes)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("here: ")
    return str(refused.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder that may be stored."""
    model = tmp_path / "model"
    (model / "more").mkdir(parents=True)
    (model / "model.safetensors").write_bytes(bytes(range(256)) * 1_000)
    (model / "config.json").write_text("{}")
    (model / "more" / "notes.txt").write_bytes(b"")
    return model


def test_fingerprint_is_the_hash_of_what_is_stored(folder: Path) -> None:
    """Whoever has the manifest file can compute it with `sha256sum`."""
    manifest = build_manifest(folder, part_size=PART)
    assert manifest.fingerprint == hashlib.sha256(manifest.canonical).hexdigest()
    assert parse_manifest(manifest.canonical, "here") == manifest
    names = [file.name for file in manifest.files]
    assert names == ["config.json", "model.safetensors", "more/notes.txt"]
    content = (folder / "model.safetensors").read_bytes()
    weights = manifest.files[1]
    assert weights.sha256 == hashlib.sha256(content).hexdigest()
    expected = [content[start : start + PART] for start in range(0, len(content), PART)]
    assert list(weights.parts) == [hashlib.sha256(part).hexdigest() for part in expected]
    assert len(weights.parts) == 4
    assert manifest.total_bytes == 256_002


def test_fingerprint_depends_on_the_content_alone(folder: Path) -> None:
    """Order and spaces do not count, a byte does."""
    one, two = entry("a.json"), entry("model.safetensors")
    assert parse(one, two).fingerprint == parse(two, one).fingerprint
    before = build_manifest(folder, part_size=PART).fingerprint
    assert build_manifest(folder, part_size=PART).fingerprint == before
    (folder / "config.json").write_text("[]")
    assert build_manifest(folder, part_size=PART).fingerprint != before


@pytest.mark.parametrize(
    "name",
    [
        "",
        "../model.safetensors",
        "a/../../model.safetensors",
        "/etc/model.safetensors",
        "a//model.safetensors",
        "./model.safetensors",
        "a\\..\\model.safetensors",
        "C:model.safetensors",
        ".hidden.safetensors",
        "more/.hidden/model.safetensors",
        "model.safetensors\n",
        "mod\x00el.safetensors",
        "a/b/c/d/model.safetensors",
        "a" * 250 + ".safetensors",
        "modél.safetensors",
        "-r.safetensors",
        MANIFEST_NAME,
    ],
)
def test_names_that_leave_the_folder_are_refused(name: str) -> None:
    """Nor does any name that some system reads otherwise get through."""
    assert "file" in refusal(entry(), entry(name))


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin",
        "model.pt",
        "model.pth",
        "model.ckpt",
        "model.pkl",
        "model.pickle",
        "model.safetensors.pkl",
        "modeling_evil.py",
        "evil.so",
        "evil.sh",
        "evil",
        "model.gguf",
    ],
)
def test_pickles_and_code_are_refused(name: str, folder: Path) -> None:
    """Both by whoever pulls and by whoever pushes."""
    assert name in refusal(entry(), entry(name))
    assert "pickled" in refusal(entry(), entry(name))
    (folder / name).write_bytes(b"x")
    with pytest.raises(WeightsError, match="pickled") as refused:
        build_manifest(folder)
    assert name in str(refused.value)


@pytest.mark.parametrize(
    ("names", "part"),
    [
        (["config.json", "config.json"], "named twice"),
        (["config.json", "CONFIG.json"], "named twice"),
        (["more.txt", "more.txt/a.txt"], "also a file"),
    ],
)
def test_names_that_clash_are_refused(names: list[str], part: str) -> None:
    """One would overwrite the other on some machine."""
    assert part in refusal(entry(), *map(entry, names))


@pytest.mark.parametrize(
    "changes",
    [
        {"size": -1},
        {"size": (1 << 40) + 1},
        {"size": True},
        {"size": 1.0},
        {"size": "1"},
        {"parts": []},
        {"parts": [SHA, SHA]},
        {"parts": ["0" * 63]},
        {"sha256": "Z" * 64},
        {"sha256": SHA + "\n"},
        {"more": 1},
        {"name": 7},
    ],
)
def test_fields_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    """Every field is checked, and none is ignored."""
    assert "files" in refusal({**entry(), **changes}) or "parts" in refusal({**entry(), **changes})


def test_sizes_no_model_has_are_refused() -> None:
    """Each file may be possible and all together not."""
    part = 1 << 30
    large = [
        {"name": f"{i}.safetensors", "size": 1 << 40, "sha256": SHA, "parts": [SHA] * 1_024}
        for i in range(5)
    ]
    assert "more than any model" in refusal(*large, part_size=part)


@pytest.mark.parametrize(
    "changes",
    [{"version": 2}, {"version": "1"}, {"part_size": 1}, {"part_size": 1 << 31}, {"extra": 1}],
)
def test_other_formats_are_refused(changes: dict[str, Any]) -> None:
    """A later version may mean something else by the same words."""
    assert next(iter(changes)) in refusal(entry(), **changes)


def test_manifests_without_weights_are_refused(folder: Path) -> None:
    """There is nothing in them that could be served."""
    assert "safetensors" in refusal(entry("config.json"))
    assert "files" in refusal()
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"no \.safetensors"):
        build_manifest(folder)


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b"\xff", b" " * MAX_MANIFEST_BYTES + b" "]
)
def test_what_is_no_manifest_is_refused(raw: bytes) -> None:
    """In one line, whatever it is."""
    with pytest.raises(WeightsError, match=r"^here: [^\n]*$"):
        parse_manifest(raw, "here")


def test_links_are_refused(folder: Path, tmp_path: Path) -> None:
    """Neither a file nor a folder elsewhere becomes part of a model."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.json").write_text("{}")
    for target in (outside / "secret.json", outside, tmp_path / "nowhere"):
        link = folder / "link.json"
        link.symlink_to(target)
        with pytest.raises(WeightsError, match=r"link\.json: is a link"):
            build_manifest(folder)
        link.unlink()
    os.mkfifo(folder / "pipe.json")
    with pytest.raises(WeightsError, match="no plain file"):
        build_manifest(folder)


def test_hidden_files_and_an_old_manifest_are_left_out(folder: Path) -> None:
    """A folder under version control can be pushed as it is."""
    (folder / ".git").mkdir()
    (folder / ".git" / "hook.py").write_text("")
    (folder / ".gitattributes").write_text("")
    (folder / MANIFEST_NAME).write_text("old")
    assert sorted(list_model_files(folder)) == [
        "config.json",
        "model.safetensors",
        "more/notes.txt",
    ]


def test_missing_folder_is_named(tmp_path: Path) -> None:
    """In one line."""
    with pytest.raises(WeightsError, match=r"nowhere: No such file"):
        build_manifest(tmp_path / "nowhere")


def test_verify_names_what_differs(folder: Path) -> None:
    """A byte, a length, a missing file, one too many."""
    with pytest.raises(WeightsError, match=MANIFEST_NAME):
        verify_folder(folder)
    manifest = build_manifest(folder, part_size=PART)
    (folder / MANIFEST_NAME).write_bytes(manifest.canonical)
    seen: list[int] = []
    assert verify_folder(folder, seen.append) == manifest
    assert sum(seen) == manifest.total_bytes
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[200_000] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text("{ }")
    (folder / "more" / "notes.txt").unlink()
    (folder / "generation_config.json").write_text("{}")
    with pytest.raises(WeightsError) as refused:
        verify_folder(folder)
    assert str(refused.value).removeprefix(f"{folder}: ").split("; ") == [
        "generation_config.json is not in the manifest",
        "config.json has 3 bytes instead of 2",
        "model.safetensors has another SHA-256",
        "more/notes.txt is missing",
    ]


@pytest.mark.parametrize(
    ("url", "bucket", "prefix", "name"),
    [
        ("s3://weights/models/tiny", "weights", "models/tiny", "tiny"),
        ("s3://weights/tiny/", "weights", "tiny", "tiny"),
        ("s3://weights", "weights", "", "weights"),
        ("s3://weights/", "weights", "", "weights"),
    ],
)
def test_location_is_taken_apart(url: str, bucket: str, prefix: str, name: str) -> None:
    """The last part is the name that the model is served under."""
    location = S3Location.parse(url)
    assert (location.bucket, location.prefix, location.model_name) == (bucket, prefix, name)
    assert location.key_of("a.json") == (f"{prefix}/a.json" if prefix else "a.json")
    assert location.url_of("a.json") == f"{location!s}/a.json"


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///prefix",
        "s3://ab",
        "s3://UPPER case/x",
        "s3://weights//x",
        "s3://weights/a/../b",
        "s3://weights/a\nb",
        "s3://weights/" + "a" * 701,
        "https://weights/x",
        "weights/x",
    ],
)
def test_what_is_no_location_is_refused(url: str) -> None:
    """In one line that quotes no more than is needed."""
    with pytest.raises(InvalidParameterError) as refused:
        S3Location.parse(url)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300
