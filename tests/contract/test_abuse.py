"""What no client should send, to a real server: each has its answer, and nobody else notices."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvicorn

from app.cli.protocol import ImpatientProtocol
from app.main import create_app
from tests.support.app_client import settings_for_tests, until
from tests.support.fake_engine import FakeEngine
from tests.support.served import example_environment, started, wait_until_ready

pytestmark = pytest.mark.slow

BODY_TIMEOUT_S = 2
#: Of the whole server; a leak of these bodies would be hundreds of megabytes.
MAX_GROWTH_BYTES = 60 * 1024 * 1024
HEAD = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
PATHS = ("/generate", "/v1/completions", "/v1/chat/completions", "/tokenize")


class Target:
    """A running server and its process."""

    def __init__(self, address: str, process: psutil.Process) -> None:
        self.url = f"http://{address}"
        host, _, port = address.rpartition(":")
        self.address = (host, int(port))
        self.process = process

    def exchange(self, data: bytes, *, half_close: bool = False, within_s: float = 30) -> bytes:
        """Send bytes as they are and return what comes until the server closes, or goes silent."""
        with socket.create_connection(self.address, timeout=within_s) as connection:
            connection.sendall(data)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
            received = b""
            with contextlib.suppress(ConnectionResetError):
                while piece := connection.recv(65_536):
                    received += piece
            return received

    def serves(self) -> bool:
        """Tell whether an ordinary request gets its answer."""
        answer = httpx.post(f"{self.url}/generate", json={"prompt": "a b"}, timeout=30)
        return answer.status_code == 200 and answer.json()["text"] == " a b"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """Run the real server around a fake engine in a process of its own."""
    folder: Path = tmp_path_factory.mktemp("abused")
    environment = example_environment(folder) | {
        "SNAPKV_BODY_TIMEOUT_S": str(BODY_TIMEOUT_S),
        "SNAPKV_LOG_LEVEL": "error",
    }
    command = ["-m", "tests.support.fake_server", "0", "0"]
    log = folder / "log"
    with started(command, environment, log) as (process, address):
        wait_until_ready(process, address, log, within_s=120)
        found = Target(address, psutil.Process(process.pid))
        assert found.serves()
        yield found
        assert found.serves()
        assert '"level":"error"' not in log.read_text().replace(": ", ":")


def declared(body: bytes, length: int | None = None) -> bytes:
    """Return a request with a body, and the length that it says it has."""
    size = len(body) if length is None else length
    return HEAD + f"Content-Length: {size}\r\n\r\n".encode() + body


def status_of(answer: bytes) -> int:
    """Return the status of the first answer in what a server sent."""
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("content", "statuses"),
    [
        (json.dumps({"prompt": "x" * 100_000}).encode(), {200, 400, 422}),
        (json.dumps({"prompt": "w " * 50_000}).encode(), {200, 400, 422}),
        (b'{"prompt": "' + b"x" * 10_000_000 + b'"}', {413}),
        (b"[" * 100_000, {400, 422}),
        (b'{"a":' * 50_000, {400, 422}),
        (b'{"prompt": ' + b"[" * 2_000 + b"]" * 2_000 + b"}", {400, 422}),
        (b'{"prompt": "\xff\xfe"}', {400, 422}),
        (b"\xff\xfe\x00\x00", {400, 422}),
        (b'{"prompt": "a\x00b"}', {400, 422}),
        (b"\x00" * 1_000, {400, 422}),
        (b"", {400, 422}),
        (b'{"prompt": ' + b"9" * 100_000 + b"}", {400, 422}),
        (b'{"prompt": "a", "n": 1e999}', {400, 422}),
        (b"{" + b",".join(b'"f%d": 1' % i for i in range(5_000)) + b"}", {400, 422}),
    ],
    ids=[
        *("characters", "words", "10 MB", "brackets", "objects", "nested prompt", "not UTF-8"),
        *("binary", "null byte", "null bytes", "empty", "long number", "infinity", "fields"),
    ],
)
def test_bodies_that_are_no_requests_get_a_4xx(
    target: Target, path: str, content: bytes, statuses: set[int]
) -> None:
    """In the shape of every error; a long text that fits is answered."""
    answer = httpx.post(
        f"{target.url}{path}",
        content=content,
        headers={"Content-Type": "application/json"},
        timeout=60,
    )
    assert answer.status_code in statuses, answer.text[:300]
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["code"]
        assert len(answer.content) < 10_000


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/xml", "multipart/form-data; boundary=x", ""]
)
def test_another_content_type_is_a_415(target: Target, content_type: str) -> None:
    answer = httpx.post(
        f"{target.url}/generate", content=b"{}", headers={"Content-Type": content_type}
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    "data",
    [
        declared(b'{"prompt": "a"', length=10_000),
        declared(b"", length=5),
        HEAD + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"pro\r\n',
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_a_body_that_stays_unfinished_is_a_408(target: Target, data: bytes) -> None:
    """The connection is closed with it, since the rest may still come."""
    start_s = time.monotonic()
    answer = target.exchange(data)
    assert time.monotonic() - start_s >= BODY_TIMEOUT_S - 0.1
    head, _, body = answer.partition(b"\r\n\r\n")
    assert status_of(answer) == 408, answer
    assert b"connection: close" in head.lower()
    assert json.loads(body)["error"]["code"] == "body_timeout"


def test_a_body_that_drips_does_not_last_longer(target: Target) -> None:
    """The time counts from the head, not from the last byte."""
    with socket.create_connection(target.address, timeout=30) as connection:
        connection.sendall(declared(b"", length=1_000))
        start_s, received = time.monotonic(), b""
        connection.settimeout(0.1)
        while not received and time.monotonic() - start_s < 20:
            connection.sendall(b" ")
            try:
                received = connection.recv(4_096)
            except TimeoutError:
                continue
    assert status_of(received) == 408
    assert time.monotonic() - start_s < BODY_TIMEOUT_S + 10


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTPT/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /health/live HTTP/1.1\r\n" + b"A: b\r\n" * 20_000 + b"\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
        HEAD + b"Content-Length: -5\r\n\r\n",
        HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_http_is_a_400_or_closed(target: Target, data: bytes) -> None:
    answer = target.exchange(data)
    assert answer == b"" or 400 <= status_of(answer) < 500, answer[:300]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        HEAD,
        declared(b'{"prompt"', length=100),
        declared(b'{"prompt": "a b"}'),
    ],
)
def test_a_half_closed_connection_ends(target: Target, data: bytes) -> None:
    """With an answer or without; it is not kept."""
    answer = target.exchange(data, half_close=True)
    assert answer == b"" or status_of(answer) in (200, 400, 408)


def test_pipelined_requests_are_answered_in_their_order(target: Target) -> None:
    first, second = declared(b'{"prompt": "a"}'), declared(b'{"prompt": "b"}')
    with socket.create_connection(target.address, timeout=30) as connection:
        connection.sendall(first + second)
        received = b""
        while received.count(b'"text":') < 2:
            piece = connection.recv(65_536)
            assert piece, received
            received += piece
    assert received.index(b'"text":" a"') < received.index(b'"text":" b"')


def test_memory_is_flat_and_others_are_served_meanwhile(target: Target) -> None:
    """After hundreds of them, many at once, with connections that only stand there."""
    bodies: list[bytes] = [
        declared(b'{"prompt": "' + b"x" * 9_000_000 + b'"}'),
        declared(b'{"prompt": "' + b"x" * 1_000_000 + b'"}'),
        declared(b"[" * 500_000),
        declared(b'{"prompt": "a', length=4_000_000),
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ]

    def abuse(number: int) -> None:
        data = bodies[number % len(bodies)]
        with socket.create_connection(target.address, timeout=60) as connection:
            # What is too large by far is sent whole: its rest would be waited for.
            is_half = number % 2 and len(data) < 5_000_000
            connection.sendall(data[: len(data) // 2] if is_half else data)
            # Every third leaves without reading its answer.
            if number % 3:
                connection.settimeout(20)
                connection.recv(65_536)

    with ThreadPoolExecutor(30) as pool:
        list(
            pool.map(lambda number: _quietly(abuse, number), range(30))
        )  # fills buffers and caches
        before = target.process.memory_info().rss
        idle = [socket.create_connection(target.address, timeout=30) for _ in range(100)]
        going = [pool.submit(_quietly, abuse, number) for number in range(100)]
        while not all(each.done() for each in going):
            assert target.serves()
        for connection in idle:
            connection.close()
    assert target.serves()
    assert target.process.memory_info().rss - before < MAX_GROWTH_BYTES


def _quietly(abuse: Any, number: int) -> None:
    """The server may reset a connection whose bytes it does not want."""
    with contextlib.suppress(ConnectionError, TimeoutError):
        abuse(number)


class _Hasty(ImpatientProtocol):
    head_timeout_s = 0.3


@pytest.mark.parametrize(
    "parts",
    [
        [b""],
        [b"GET /health/live HTTP/1.1\r\nHost"],
        [b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /"],
    ],
)
async def test_a_head_that_stays_unfinished_ends_the_connection(parts: list[bytes]) -> None:
    """The first one of a connection, or a later one."""
    app = create_app(settings_for_tests(), FakeEngine())
    config = uvicorn.Config(app, port=0, http=_Hasty, log_config=None, timeout_keep_alive=600)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for part in parts:
            writer.write(part)
            if part.endswith(b"\r\n\r\n"):
                assert b"alive" in await reader.readuntil(b"}")
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()
    finally:
        server.should_exit = True
        await serving


async def test_a_body_that_nobody_reads_holds_no_connection() -> None:
    """The answer to it is out, and what drips in behind it is no request."""
    app = create_app(settings_for_tests(), FakeEngine())
    config = uvicorn.Config(app, port=0, http=_Hasty, log_config=None, timeout_keep_alive=600)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{")
        assert b"404" in await reader.readline()
        ended = asyncio.create_task(reader.read())
        async with asyncio.timeout(10):
            while not ended.done():
                writer.write(b" ")
                await asyncio.sleep(0.05)
        with contextlib.suppress(ConnectionError):
            ended.result()
        writer.close()
    finally:
        server.should_exit = True
        await serving


async def test_a_body_and_an_answer_may_take_longer_than_a_head() -> None:
    app = create_app(settings_for_tests(), FakeEngine())
    config = uvicorn.Config(app, port=0, http=_Hasty, log_config=None)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(declared(b"", length=15))
        await asyncio.sleep(1)
        writer.write(b'{"prompt": "a"}')
        assert b"200" in await reader.readline()
        writer.close()
    finally:
        server.should_exit = True
        await serving
