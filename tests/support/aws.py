"""AWS on loopback: moto's server for what works, and a server that answers what a test says."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from app.integrations.aws.request_item import REQUEST_LOG_TABLE

REGION = "ap-northeast-1"

#: Takes a request's body; returns status and body of the answer.
Answer = Callable[[dict[str, Any]], tuple[int, object]]


@contextmanager
def moto_server() -> Iterator[str]:
    """Run moto's server and yield its URL; all of a process share what they hold."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def use_aws(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Send the SDK's calls to `url`, whatever the shell that runs the tests is set to."""
    for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "AWS_ENDPOINT_URL": url,
        "AWS_REGION": REGION,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)


def plain_client(service: str, url: str) -> Any:
    """Return a client for what a test itself wants to do, whatever the environment is set to."""
    return boto3.client(
        service,
        endpoint_url=url,
        region_name=REGION,
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
    )


def create_request_log_table(url: str, table: str) -> None:
    """Create the table that the schema describes."""
    schema = REQUEST_LOG_TABLE
    client = plain_client("dynamodb", url)
    client.create_table(
        TableName=table,
        BillingMode=schema.billing_mode,
        KeySchema=[
            {"AttributeName": schema.hash_key, "KeyType": "HASH"},
            {"AttributeName": schema.range_key, "KeyType": "RANGE"},
        ],
        AttributeDefinitions=[
            {"AttributeName": name, "AttributeType": schema.attributes[name]}
            for name in (schema.hash_key, schema.range_key, schema.index.hash_key)
        ],
        GlobalSecondaryIndexes=[
            {
                "IndexName": schema.index.name,
                "KeySchema": [
                    {"AttributeName": schema.index.hash_key, "KeyType": "HASH"},
                    {"AttributeName": schema.index.range_key, "KeyType": "RANGE"},
                ],
                "Projection": {
                    "ProjectionType": "INCLUDE",
                    "NonKeyAttributes": schema.index.projected,
                },
            }
        ],
    )
    client.update_time_to_live(
        TableName=table,
        TimeToLiveSpecification={"Enabled": True, "AttributeName": schema.ttl_attribute},
    )


def items_of(url: str, table: str) -> list[dict[str, Any]]:
    """Return the items of a table, in DynamoDB's notation."""
    items: list[dict[str, Any]] = plain_client("dynamodb", url).scan(TableName=table)["Items"]
    return items


class ScriptedAws:
    """Answers AWS's JSON protocol with whatever a test says; use it as a context.

    Attributes:
        answer: Called for each request, on a thread of its own; tests replace it.
        requests: Bodies of the requests, in the order in which they came.
        released: Set at the end, for answers that wait.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "ScriptedAws":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def hang(self, _body: dict[str, Any]) -> tuple[int, object]:
        """Answer nothing for half a minute."""
        self.released.wait(30)
        return 200, {}


def _handler_of(aws: ScriptedAws) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the base class chose the name
            length = int(self.headers["Content-Length"])
            body = json.loads(self.rfile.read(length))
            aws.requests.append(body)
            status, answer = aws.answer(body)
            raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Type", "application/x-amz-json-1.0")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)
            except ConnectionError:
                pass  # the client gave up, as it was meant to

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    return Handler


def error(code: str, status: int = 400) -> Answer:
    """Answer every request with an error of AWS."""
    return lambda _body: (status, {"__type": f"com.amazonaws#{code}", "message": "no"})
