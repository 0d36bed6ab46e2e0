"""What the Valkey store is told: its URL, and values that do not go together."""

from pathlib import Path
from typing import Any

import pytest

from app.integrations.valkey.config import ElastiCacheLogin, ValkeyConfig
from snapkv_core import InvalidParameterError

LOGIN = ElastiCacheLogin(cache_name="my-cache", user_id="snapkv")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("valkey://cache", ("cache", 6379, 0, False, None, None)),
        ("redis://cache:7000/3", ("cache", 7000, 3, False, None, None)),
        ("valkeys://:p%40ss@cache", ("cache", 6379, 0, True, None, "p@ss")),
        ("rediss://me%3A:p%2Fss@[::1]:1/", ("::1", 1, 0, True, "me:", "p/ss")),
    ],
)
def test_url_is_taken_apart(url: str, expected: tuple[object, ...]) -> None:
    """User and password may hold any character, percent-encoded."""
    config = ValkeyConfig.from_url(url)
    found = (
        config.host,
        config.port,
        config.db,
        config.has_tls,
        config.username,
        config.password,
    )
    assert found == expected


@pytest.mark.parametrize(
    "url",
    [
        "cache:6379",
        "http://:hunter2@cache",
        "valkey://:hunter2@",
        "valkey://:hunter2@cache:99999",
        "valkey://:hunter2@cache:port",
        "valkey://:hunter2@cache/first",
        "valkey://:hunter2@cache/0?ssl_cert_reqs=none",
        "valkey://:hunter2@cache/0#1",
        "valkey://:hunter2@[cache",
    ],
)
def test_other_urls_are_refused_without_repeating_them(url: str) -> None:
    """They may hold a password."""
    with pytest.raises(InvalidParameterError, match=r"^url: ") as caught:
        ValkeyConfig.from_url(url)
    assert "hunter2" not in str(caught.value)


def test_password_is_not_shown() -> None:
    """Configurations are logged and compared in tests."""
    config = ValkeyConfig.from_url("valkey://me:hunter2@cache")
    assert "hunter2" not in repr(config)


@pytest.mark.parametrize(
    ("url", "options", "field"),
    [
        ("valkey://cache", {"ttl_s": 0}, "ttl_s"),
        ("valkey://cache", {"chunk_bytes": 512 << 20}, "chunk_bytes"),
        ("valkey://cache", {"chunk_bytes": 1}, "chunk_bytes"),
        ("valkey://cache", {"num_chunks_per_trip": 0}, "num_chunks_per_trip"),
        ("valkey://cache", {"get_timeout_s": 0.0}, "get_timeout_s"),
        ("valkey://cache", {"idle_timeout_s": float("inf")}, "idle_timeout_s"),
        ("valkey://cache/1", {"is_cluster": True}, "db"),
        ("valkey://cache", {"ca_file": Path("pyproject.toml")}, "ca_file"),
        ("valkeys://cache", {"ca_file": Path("no-such-file")}, "ca_file"),
        ("valkey://cache", {"elasticache": LOGIN}, "elasticache"),
        ("valkeys://me:secret@cache", {"elasticache": LOGIN}, "elasticache"),
    ],
)
def test_values_that_cannot_be_are_refused(url: str, options: dict[str, Any], field: str) -> None:
    """The error names the field."""
    with pytest.raises(InvalidParameterError) as caught:
        ValkeyConfig.from_url(url, **options)
    assert caught.value.field == field
