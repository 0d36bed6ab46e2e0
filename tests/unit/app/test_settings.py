"""Settings: what the environment says, what is refused, and that the page about them is current."""

import dataclasses
import os
import re
from pathlib import Path

import pytest

from app.cli.settings_doc import settings_table
from app.settings import Settings, SettingsError, load_settings
from snapkv_core import CompressionConfig, EngineConfig
from tests.support.markdown import ROOT


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the settings of whoever runs the tests."""
    for name in list(os.environ):  # noqa: TID251  # what the settings read is under test
        if name.upper().startswith("SNAPKV_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_defaults_are_the_documented_ones() -> None:
    """Nothing set means a local demo server."""
    settings = load_settings()
    assert (settings.host, settings.port, settings.model) == ("127.0.0.1", 8000, "demo")
    assert settings.to_engine_config() == EngineConfig()
    assert settings.default_compression() == CompressionConfig("snapkv", 512, 16, 15, "max")


def test_other_models_get_the_papers_defaults() -> None:
    """The small capacities are for the demo model only."""
    settings = load_settings({"model": "owner/name"})
    assert settings.default_compression() == CompressionConfig("snapkv", 4096, 32, 3, "avg")


def test_environment_wins_over_the_file_and_options_over_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The nearer source wins."""
    (tmp_path / ".env").write_text(
        "SNAPKV_PORT=1\nSNAPKV_HOST=0.0.0.0\nSNAPKV_MODEL=a/b\nOTHER=1\n", encoding="utf-8"
    )
    monkeypatch.setenv("SNAPKV_PORT", "2")
    monkeypatch.setenv("SNAPKV_HOST", "::1")
    settings = load_settings({"host": "localhost", "port": None})
    assert (settings.host, settings.port, settings.model) == ("localhost", 2, "a/b")


def test_every_variable_reaches_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting is read and dropped."""
    values = {
        "MODEL": "a/b",
        "MODEL_REVISION": "main",
        "SERVED_MODEL_NAME": "name",
        "DEVICE": "cpu",
        "DTYPE": "BFLOAT16",
        "CACHE_DIR": "cache",
        "MAX_MODEL_LEN": "100",
        "MAX_NUM_SEQS": "2",
        "MAX_NUM_WAITING": "3",
        "ATTENTION_BACKEND": "matmul",
        "PAGE_SIZE": "32",
        "KV_CACHE_BYTES": "1000000",
        "KV_MEMORY_FRACTION": "0.25",
        "PREFILL_CHUNK_TOKENS": "64",
        "DECODE_GAP_TARGET_MS": "75",
        "OVERTAKE_MAX_TOKENS": "0",
        "REQUEST_TIMEOUT_S": "12.5",
        "DEFAULT_MAX_NEW_TOKENS": "5",
        "MAX_NEW_TOKENS_LIMIT": "6",
        "NUM_THREADS": "1",
        "METHOD": "full",
        "MAX_CAPACITY_PROMPT": "70",
        "WINDOW_SIZE": "7",
        "KERNEL_SIZE": "5",
        "POOLING": "max",
    }
    for name, value in values.items():
        monkeypatch.setenv(f"SNAPKV_{name}", value)
    settings = load_settings()
    assert settings.to_engine_config() == EngineConfig(
        model="a/b",
        revision="main",
        device="cpu",
        dtype="bfloat16",
        cache_dir="cache",
        served_model_name="name",
        max_model_len=100,
        max_num_seqs=2,
        max_num_waiting=3,
        attention_backend="matmul",
        page_size=32,
        kv_cache_bytes=1_000_000,
        kv_memory_fraction=0.25,
        prefill_chunk_tokens=64,
        decode_gap_target_ms=75,
        overtake_max_tokens=0,
        request_timeout_s=12.5,
        default_max_new_tokens=5,
        max_new_tokens_limit=6,
        num_threads=1,
    )
    assert settings.default_compression() == CompressionConfig("full", 70, 7, 5, "max")


def test_every_field_of_the_engine_has_a_setting() -> None:
    """A new field of the engine's configuration can be set from outside."""
    renamed = {"revision": "model_revision"}
    fields = {renamed.get(field.name, field.name) for field in dataclasses.fields(EngineConfig)}
    assert fields <= set(Settings.model_fields)


def test_empty_values_count_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose files and charts pass empty strings for what they do not set."""
    monkeypatch.setenv("SNAPKV_MAX_MODEL_LEN", "")
    monkeypatch.setenv("SNAPKV_PORT", "")
    assert load_settings().max_model_len is None


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("SNAPKV_PORT", "abc", "integer"),
        ("SNAPKV_PORT", "65536", "65535"),
        ("SNAPKV_PORT", "tcp://10.0.0.1:8000", "enableServiceLinks"),
        ("SNAPKV_DTYPE", "float8", "float32"),
        ("SNAPKV_LOG_LEVEL", "loud", "debug"),
        ("SNAPKV_MAX_NUM_SEQS", "0", "from 1 to"),
        ("SNAPKV_KERNEL_SIZE", "4", "odd"),
        ("SNAPKV_MAX_CAPACITY_PROMPT", "16", "greater than window_size"),
        ("SNAPKV_METHOD", "h2o", "snapkv"),
        ("SNAPKV_MODEL", " ", "must name a model"),
        ("SNAPKV_DEFAULT_MAX_NEW_TOKENS", "5000", "4096"),
        ("SNAPKV_MAX_BODY_BYTES", "0", "1024"),
        ("SNAPKV_PAGE_SIZE", "48", "power of two"),
        ("SNAPKV_PAGE_SIZE", "512", "from 1 to 64"),
        ("SNAPKV_KV_CACHE_BYTES", "8GiB", "integer"),
        ("SNAPKV_KV_CACHE_BYTES", "0", "from 1 to"),
        ("SNAPKV_KV_MEMORY_FRACTION", "1.5", "from 0.01 to 1"),
        ("SNAPKV_KV_MEMORY_FRACTION", "nan", "finite"),
        ("SNAPKV_DECODE_GAP_TARGET_MS", "0", "from 1 to"),
        ("SNAPKV_OVERTAKE_MAX_TOKENS", "-1", "from 0 to"),
        ("SNAPKV_REQUEST_TIMEOUT_S", "inf", "finite"),
        ("SNAPKV_REQUEST_TIMEOUT_S", "0", "from 0.001 to"),
        ("SNAPKV_STALL_TIMEOUT_S", "0", "greater than or equal to 1"),
        ("SNAPKV_STALL_TIMEOUT_S", "1.5", "integer"),
    ],
)
def test_bad_value_is_one_line_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, part: str
) -> None:
    """The service does not start, and says which variable to change."""
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        load_settings()
    message = str(caught.value)
    assert message.startswith(f"{name}: ")
    assert part in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SNAPKV_OTLP_ENDPOINT", "collector.example/v1/traces?api-key=sk-live-1234567890"),
        ("SNAPKV_OTLP_ENDPOINT", "https://user:sk-live-1234567890@ho st/v1/traces"),
        ("SNAPKV_XRAY_DAEMON_ADDRESS", "udp://user:sk-live-1234567890@daemon:2000"),
    ],
)
def test_bad_address_is_not_quoted(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """It may hold a password or a key."""
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert str(caught.value).startswith(f"{name}: String should match pattern '^")
    assert "sk-live" not in str(caught.value)


@pytest.mark.parametrize("where", ["environment", "file"])
def test_misspelled_variable_is_refused_with_the_closest_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    """A typo would otherwise leave a default in force without a word."""
    if where == "environment":
        monkeypatch.setenv("SNAPKV_MAX_CAPACITY", "1024")
    else:
        (tmp_path / ".env").write_text("SNAPKV_MAX_CAPACITY=1024\n", encoding="utf-8")
    with pytest.raises(SettingsError, match=r"^SNAPKV_MAX_CAPACITY: .*SNAPKV_MAX_CAPACITY_PROMPT"):
        load_settings()


def test_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    """A broken file is an error of its own, not a crash."""
    (tmp_path / ".env").write_bytes(b"SNAPKV_MODEL=\xff\n")
    with pytest.raises(SettingsError, match=r"\.env: is not UTF-8"):
        load_settings()


def test_what_kubernetes_injects_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Service links share our prefix when the Service is called snapkv."""
    for name, value in {
        "SNAPKV_SERVICE_HOST": "10.0.0.1",
        "SNAPKV_SERVICE_PORT": "8000",
        "SNAPKV_SERVICE_PORT_HTTP": "8000",
        "SNAPKV_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "SNAPKV_PORT_8000_TCP_ADDR": "10.0.0.1",
        "SNAPKV_INFERENCE_SERVICE_HOST": "10.0.0.1",
        "SNAPKV_INFERENCE_PORT": "tcp://10.0.0.1:8000",
        "SNAPKV_TEST_NETWORK": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert load_settings().port == 8000


def test_page_about_settings_is_current() -> None:
    """docs/settings.md is what the command writes."""
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == settings_table(), "run: snapkv settings-doc > docs/settings.md"


def test_every_setting_says_what_it_is() -> None:
    """A field without a description would be an empty row."""
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert re.search(r"\.$", field.description), name
