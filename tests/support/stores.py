"""Stores over servers on loopback, with limits that let a test wait for their end."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import quote

import pytest

from app.integrations.aws.snapshot_store import S3Store, S3StoreConfig, open_s3_store
from app.integrations.aws.weights.location import S3Location
from app.integrations.valkey.config import ValkeyConfig
from app.integrations.valkey.store import ValkeyStore
from tests.support.s3 import s3_environment

#: Small, so that little data has many chunks.
CHUNK_BYTES: Final = 1 << 16
#: The smallest that S3 takes.
PART_BYTES: Final = 5 << 20
BUCKET: Final = "snapshots"
LOCATION: Final = S3Location(BUCKET, "kv/v1")
KEY: Final = "0123456789abcdef" * 4


def key_of(number: int) -> str:
    """Return a key."""
    return f"{number:064x}"


def blob_of(num_bytes: int, seed: int = 0) -> bytes:
    """Return bytes that nothing can compress or confuse."""
    return random.Random(seed).randbytes(num_bytes)


def valkey_config(url: str, **options: Any) -> ValkeyConfig:
    """Return a configuration whose calls fail within a second or so, and whose chunks are small."""
    limits: dict[str, Any] = {
        "chunk_bytes": CHUNK_BYTES,
        "connect_timeout_s": 1.0,
        "idle_timeout_s": 1.0,
    }
    return ValkeyConfig.from_url(url, **(limits | options))


@contextmanager
def valkey_store(url: str, **options: Any) -> Iterator[ValkeyStore]:
    """Open a store and close it."""
    store = ValkeyStore(valkey_config(url, **options))
    try:
        yield store
    finally:
        store.close()


@contextmanager
def s3_store(monkeypatch: pytest.MonkeyPatch, url: str, **options: Any) -> Iterator[S3Store]:
    """Open a store whose S3 is a server on loopback, and close it."""
    for name, value in s3_environment(url).items():
        monkeypatch.setenv(name, value)
    given: dict[str, Any] = {"location": LOCATION, "part_bytes": PART_BYTES}
    store = open_s3_store(S3StoreConfig(**(given | options)))
    try:
        yield store
    finally:
        store.close()


def user_url(port: int, user: str, password: str, scheme: str = "valkey") -> str:
    """Return a URL with a user."""
    return f"{scheme}://{user}:{quote(password, safe='')}@127.0.0.1:{port}"


def tls_lines(files: Any) -> list[str]:
    """Return the lines with which a server takes TLS only, and asks clients for no certificate."""
    return [
        "port 0",
        f"tls-cert-file {files.certificate}",
        f"tls-key-file {files.key}",
        f"tls-ca-cert-file {files.ca}",
        "tls-auth-clients no",
    ]
