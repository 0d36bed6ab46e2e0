"""What AWS's client logs at debug level, against a real server: no secret is among it."""

import io
import logging
import uuid
from collections.abc import Iterator

import boto3
import pytest
from moto.server import ThreadedMotoServer

from tests.support.logs import captured_log

KEY_ID = "AKIAIOSFODNN7EXAMPLE"
SECRET_KEY = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
SESSION_TOKEN = "session-hunter1"
SECRET = '{"api_keys": ["hunter2-hunter2"]}'


@pytest.fixture
def endpoint() -> Iterator[str]:
    """Serve AWS's interfaces on loopback."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def read_secret(endpoint: str) -> str:
    """Write a secret and read it back, as the service reads its settings."""
    client = boto3.client(
        "secretsmanager",
        endpoint_url=endpoint,
        region_name="ap-northeast-1",
        aws_access_key_id=KEY_ID,
        aws_secret_access_key=SECRET_KEY,
        aws_session_token=SESSION_TOKEN,
    )
    # Servers of one process share what they hold.
    name = f"snapkv/{uuid.uuid4().hex}"
    client.create_secret(Name=name, SecretString=SECRET)
    value: str = client.get_secret_value(SecretId=name)["SecretString"]
    return value


def leaked(log: io.StringIO) -> list[str]:
    """Return what must not be in the log and is."""
    text = log.getvalue()
    return [part for part in (KEY_ID, SECRET_KEY, "hunter1", "hunter2") if part in text]


def test_reading_a_secret_at_debug_level_logs_none_of_it(endpoint: str) -> None:
    """Neither the value nor the credentials it was read with."""
    with captured_log("debug") as log:
        assert read_secret(endpoint) == SECRET
        assert leaked(log) == []


def test_that_would_be_seen(endpoint: str) -> None:
    """With its debug lines let through, the client does log secrets: this is what is kept out."""
    with captured_log("debug") as log:
        plain = logging.StreamHandler(log)
        logging.getLogger("botocore").addHandler(plain)
        logging.getLogger("botocore").setLevel(logging.DEBUG)
        try:
            read_secret(endpoint)
        finally:
            logging.getLogger("botocore").removeHandler(plain)
            logging.getLogger("botocore").setLevel(logging.INFO)
        assert "hunter2" in leaked(log)
