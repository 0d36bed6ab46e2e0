"""Servers for the stores of a whole run: Redis by itself, with users over TLS, in a cluster; S3."""

from collections.abc import Iterator, Sequence

import pytest

from tests.support.aws import plain_client
from tests.support.certificates import TlsFiles, write_tls_files
from tests.support.redis_server import (
    PASSWORD,
    USER,
    USERS,
    RedisServer,
    redis_cluster,
    redis_server,
)
from tests.support.s3 import moto_server
from tests.support.stores import BUCKET, tls_lines, user_url
from tests.support.tools import require_tool


@pytest.fixture(scope="session")
def redis_program() -> str:
    """Find the server."""
    return require_tool("redis-server", "SNAPKV_TEST_REDIS_SERVER")


@pytest.fixture(scope="session")
def redis(redis_program: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Run a server that anyone may use."""
    with redis_server(redis_program, tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def tls_files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """Make certificates for 127.0.0.1."""
    return write_tls_files(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="session")
def tls_url(
    redis_program: str, tls_files: TlsFiles, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Run a server with users, over TLS only; return the URL of the user made for the store."""
    folder = tmp_path_factory.mktemp("redis-tls")
    lines = [*tls_lines(tls_files), *USERS]
    with redis_server(redis_program, folder, *lines, port_name="tls-port") as server:
        yield user_url(server.port, USER, PASSWORD, "valkeys")


@pytest.fixture(scope="session")
def cluster(
    redis_program: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sequence[RedisServer]]:
    """Run a cluster of three."""
    cli = require_tool("redis-cli", "SNAPKV_TEST_REDIS_CLI")
    with redis_cluster(redis_program, cli, tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """Run an S3 with an empty bucket."""
    with moto_server() as url:
        plain_client("s3", url).create_bucket(
            Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": "ap-northeast-1"}
        )
        yield url
