"""A fake S3 with a model in it, and a place to pull it to."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.integrations.aws.weights.manifest import Manifest
from tests.support.s3 import PART_BYTES, FakeS3, s3_environment, serving_s3
from tests.support.weights import NUM_PARTS, WEIGHTS


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
