"""Where a setting comes from when a secret may hold it too, and that keys are never shown."""

import json
import os
import traceback
from pathlib import Path

import pytest
from pydantic import SecretStr

from app.settings import SettingsError, load_settings

KEY = "sk-live-0123456789abcdef"
SECRET_ID = "snapkv/inference-config"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the settings of whoever runs the tests, and name a secret."""
    for name in list(os.environ):  # noqa: TID251  # what the settings read is under test
        if name.upper().startswith("SNAPKV_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SNAPKV_SECRET_ID", SECRET_ID)


def test_secret_sets_what_nothing_nearer_sets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Option over variable over file over secret over default."""
    secret = {
        "model": "secret/model",
        "kernel_size": 3,
        "window_size": 8,
        "max_capacity_prompt": 100,
    }
    lines = "SNAPKV_MODEL=file/model\nSNAPKV_KERNEL_SIZE=5\nSNAPKV_WINDOW_SIZE=10\n"
    (tmp_path / ".env").write_text(lines, encoding="utf-8")
    monkeypatch.setenv("SNAPKV_MODEL", "variable/model")
    monkeypatch.setenv("SNAPKV_KERNEL_SIZE", "7")
    settings = load_settings({"model": "option/model"}, read_secret=lambda _id: secret)
    assert settings.model == "option/model"
    assert settings.kernel_size == 7
    assert settings.window_size == 10
    assert settings.max_capacity_prompt == 100
    assert settings.pooling is None


def test_empty_variable_leaves_the_setting_to_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose files pass empty strings for what they do not set."""
    monkeypatch.setenv("SNAPKV_KERNEL_SIZE", "")
    settings = load_settings(read_secret=lambda _id: {"kernel_size": 9})
    assert settings.default_compression().kernel_size == 9


def test_model_of_the_secret_is_loaded_with_its_defaults() -> None:
    """The demo model's small capacity belongs to the demo model."""
    settings = load_settings(read_secret=lambda _id: {"model": "owner/name"})
    assert settings.to_engine_config().model == "owner/name"
    assert settings.default_compression().max_capacity_prompt == 4_096


def test_secret_is_read_only_when_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call to AWS without a setting that asks for it, nor without a reader."""
    asked: list[str] = []

    def read(secret_id: str) -> dict[str, object]:
        asked.append(secret_id)
        return {}

    load_settings()
    assert asked == []
    load_settings(read_secret=read)
    assert asked == [SECRET_ID]
    monkeypatch.delenv("SNAPKV_SECRET_ID")
    load_settings(read_secret=read)
    assert asked == [SECRET_ID]


@pytest.mark.parametrize(
    ("secret", "message"),
    [
        ({"kernel_size": 4}, "kernel_size: must be odd so that pooling is centred"),
        ({"window_size": 0}, "window_size: must be an integer from 1 to 1024"),
        ({"max_capacity_prompt": 16}, "max_capacity_prompt: must be greater than window_size (16)"),
        ({"window_size": 600}, "max_capacity_prompt: must be greater than window_size (600)"),
    ],
)
def test_value_out_of_range_names_the_secret_and_not_the_value(
    secret: dict[str, object], message: str
) -> None:
    """Whoever reads it knows where to look."""
    with pytest.raises(SettingsError) as caught:
        load_settings(read_secret=lambda _id: secret)
    assert str(caught.value) == f"secret {SECRET_ID}: {message}"


def test_value_of_a_variable_is_blamed_on_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even when the secret holds the same setting."""
    monkeypatch.setenv("SNAPKV_KERNEL_SIZE", "4")
    with pytest.raises(SettingsError, match=r"^SNAPKV_KERNEL_SIZE: .*got 4$"):
        load_settings(read_secret=lambda _id: {"kernel_size": 5, "window_size": 8})


def test_failure_to_read_is_passed_on() -> None:
    """The reader's own line is the message."""

    def fail(secret_id: str) -> dict[str, object]:
        raise SettingsError(f"secret {secret_id}: access is denied")

    with pytest.raises(SettingsError, match=r"^secret .*: access is denied$"):
        load_settings(read_secret=fail)


@pytest.mark.parametrize(
    ("text", "names"),
    [(json.dumps([KEY]), ["key-1"]), (json.dumps({"team-a": KEY}), ["team-a"]), ("[]", [])],
)
def test_keys_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, text: str, names: list[str]
) -> None:
    """The same two forms as in the secret; nothing that prints settings prints a key."""
    monkeypatch.setenv("SNAPKV_API_KEYS", text)
    settings = load_settings(read_secret=lambda _id: {"api_keys": {"other": SecretStr("x" * 20)}})
    assert settings.api_keys == {name: SecretStr(KEY) for name in names}
    for form in (repr(settings), str(settings), settings.model_dump_json()):
        assert KEY not in form
    assert KEY not in repr(settings.model_dump())


@pytest.mark.parametrize("text", [KEY, f'["{KEY}"', f'["{KEY} "]', f'{{"{KEY}": "a"}}', f'"{KEY}"'])
@pytest.mark.parametrize("where", ["environment", "file"])
def test_bad_keys_are_not_quoted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str, text: str
) -> None:
    """Unlike other values, which the message shows."""
    if where == "environment":
        monkeypatch.setenv("SNAPKV_API_KEYS", text)
    else:
        (tmp_path / ".env").write_text(f"SNAPKV_API_KEYS='{text}'\n", encoding="utf-8")
    with pytest.raises(SettingsError, match=r"^SNAPKV_API_KEYS: ") as caught:
        load_settings()
    assert "\n" not in str(caught.value)
    assert KEY not in "".join(traceback.format_exception(caught.value))
