"""Models are the same where their weights and their configuration are, whatever else differs."""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest

from snapkv_core import EngineConfig, ModelLoadError, weights_fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"rope_theta": 1}')
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"first")
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"second")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def fingerprint(folder: Path) -> str:
    return weights_fingerprint(EngineConfig(model=str(folder)))


def test_it_is_of_the_content_and_of_no_name(folder: Path, tmp_path: Path) -> None:
    copy = copytree(folder, tmp_path / "another-name")
    (copy / "README.md").write_text("no part of the model")
    (copy / "tokenizer.json").write_text('{"other": 1}')
    assert fingerprint(copy) == fingerprint(folder)
    assert len(fingerprint(folder)) == 64


def _swap(folder: Path) -> None:
    one, two = sorted(folder.glob("*.safetensors"))
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "config.json").write_text('{"rope_theta": 2}'),
        lambda folder: (folder / "model-00002-of-00002.safetensors").write_bytes(b"secone"),
        lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(),
        lambda folder: (folder / "more.safetensors").write_bytes(b""),
        _swap,
    ],
    ids=["config", "weights", "fewer", "more", "swapped"],
)
def test_any_change_of_what_answers_depend_on_changes_it(
    folder: Path, change: Callable[[Path], object]
) -> None:
    before = fingerprint(folder)
    change(folder)
    assert fingerprint(folder) != before


def test_weights_in_another_format_count_as_well(folder: Path) -> None:
    """Which of both are loaded is not for this to know."""
    found = {fingerprint(folder)}
    for content in (b"one", b"another"):
        (folder / "pytorch_model.bin").write_bytes(content)
        found.add(fingerprint(folder))
    for file in folder.glob("*.safetensors"):
        file.unlink()
    found.add(fingerprint(folder))
    assert len(found) == 4


def test_a_folder_without_weights_is_like_any_other_without(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ModelLoadError, match="no weights"):
        fingerprint(folder)


def test_file_that_is_gone_is_named(folder: Path) -> None:
    (folder / "gone.safetensors").symlink_to(folder / "nowhere")
    with pytest.raises(ModelLoadError, match=r"gone\.safetensors"):
        fingerprint(folder)
