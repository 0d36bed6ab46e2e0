"""S3 for tests: moto's server for what works, a server of our own for what goes wrong."""

import hashlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from moto.server import ThreadedMotoServer

from app.integrations.aws.s3_client import create_s3_client
from app.integrations.aws.weights.folder import build_manifest
from app.integrations.aws.weights.location import S3Location
from app.integrations.aws.weights.manifest import MANIFEST_NAME, Manifest
from app.integrations.aws.weights.progress import TransferProgress
from app.integrations.aws.weights.pull import CreateClient

#: The smallest there are, so that little data has many parts.
PART_BYTES: Final = 1 << 16
BUCKET: Final = "weights"
LOCATION: Final = S3Location(BUCKET, "models/tiny")
#: Longer than any test waits.
_HOLD_S: Final = 60.0
_TRICKLE_S: Final = 0.02
_RANGE: Final = re.compile(r"bytes=(\d+)-(\d+)")


def s3_environment(url: str) -> dict[str, str]:
    """Return the variables with which the SDK talks to a server and to nothing else."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "tangerine",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "NO_PROXY": "127.0.0.1",
    }


def client_maker(**limits: Any) -> CreateClient:
    """Return what makes clients that give up quickly."""
    given = {"read_timeout_s": 5.0, "max_attempts": 1, **limits}
    return lambda max_connections: create_s3_client(max_connections=max_connections, **given)


def ignore_progress(progress: TransferProgress) -> None:
    """Watch nothing."""


@contextmanager
def moto_server() -> Iterator[str]:
    """Run moto's S3 and yield its URL."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@dataclass(frozen=True, slots=True)
class S3Request:
    """A request that came in.

    Attributes:
        method: `GET` or `HEAD`.
        key: Key of the object, without the bucket.
        start: First byte of the range; None for the whole object.
    """

    method: str
    key: str
    start: int | None


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one answer.

    Attributes:
        status: Status of an error to answer with.
        code: Code of that error.
        flip: Change the first byte of the body.
        send_bytes: Break the connection after so many bytes of the body.
        hold: Send nothing after those bytes until this is set.
        trickle: Send a byte now and then.
        ignore_range: Answer with the whole object.
    """

    status: int | None = None
    code: str = ""
    flip: bool = False
    send_bytes: int | None = None
    hold: threading.Event | None = None
    trickle: bool = False
    ignore_range: bool = False


@dataclass
class FakeS3:
    """Answers GET and HEAD of objects, with faults to order.

    Attributes:
        objects: Content by key.
        fault_of: Says what goes wrong with a request; called on the server's threads.
        requests: What came in, in order.
        headers: Further headers of every answer.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    fault_of: Callable[[S3Request], Fault | None] = lambda _: None
    requests: list[S3Request] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    closing: threading.Event = field(default_factory=threading.Event)

    def starts_of(self, name: str) -> list[int]:
        """Return where the ranges began that were asked for of one file, in order."""
        key = LOCATION.key_of(name)
        found = [request for request in self.requests if request.key == key]
        return [request.start for request in found if request.start is not None]

    def store(self, folder: Path) -> Manifest:
        """Hold a model's folder as a push leaves it."""
        manifest = build_manifest(folder, part_size=PART_BYTES)
        for file in manifest.files:
            self.objects[LOCATION.key_of(file.name)] = (folder / file.name).read_bytes()
        self.objects[LOCATION.key_of(MANIFEST_NAME)] = manifest.canonical
        return manifest


@contextmanager
def serving_s3(fake: FakeS3) -> Iterator[str]:
    """Run a fake S3 and yield its URL."""

    class Handler(_Handler):
        s3 = fake

    server = _QuietServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        fake.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _QuietServer(ThreadingHTTPServer):
    """A server whose clients may be killed without a word of it."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Let a connection end as its client wants it."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One connection to a fake S3."""

    protocol_version = "HTTP/1.1"
    s3: FakeS3

    def do_GET(self) -> None:
        """Answer a GET."""
        self._answer()

    def do_HEAD(self) -> None:
        """Answer a HEAD."""
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        key = self.path.partition("?")[0].removeprefix(f"/{BUCKET}/")
        wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
        start = int(wanted[1]) if wanted else None
        request = S3Request(self.command, key, start)
        self.s3.requests.append(request)
        fault = self.s3.fault_of(request) or Fault()
        content = self.s3.objects.get(key)
        if fault.status is not None:
            return self._refuse(fault.status, fault.code)
        if content is None:
            return self._refuse(404, "NoSuchKey")
        etag = f'"{hashlib.md5(content).hexdigest()}"'
        if self.headers.get("If-Match", etag) != etag:
            return self._refuse(412, "PreconditionFailed")
        headers, status, body = {"ETag": etag, **self.s3.headers}, 200, content
        if wanted and not fault.ignore_range:
            first, last = int(wanted[1]), int(wanted[2])
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            status, body = 206, content[first : last + 1]
        self._begin(status, len(body), headers)
        if self.command == "GET":
            self._send_body(body, fault)
        return None

    def _refuse(self, status: int, code: str) -> None:
        body = f"<Error><Code>{code}</Code><Message>secret words</Message></Error>".encode()
        self._begin(status, len(body), {})
        if self.command == "GET":
            self.wfile.write(body)

    def _begin(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def _send_body(self, body: bytes, fault: Fault) -> None:
        if fault.flip:
            body = bytes([body[0] ^ 1]) + body[1:]
        try:
            if fault.trickle:
                for index in range(len(body)):
                    self.wfile.write(body[index : index + 1])
                    if self.s3.closing.wait(_TRICKLE_S):
                        break
                self.close_connection = True
                return
            self.wfile.write(body[: fault.send_bytes])
            self.wfile.flush()
            if fault.hold is not None:
                fault.hold.wait(_HOLD_S)
                self.wfile.write(b"" if fault.send_bytes is None else body[fault.send_bytes :])
            elif fault.send_bytes is not None:
                self.close_connection = True
        except OSError:
            self.close_connection = True  # the client has left
