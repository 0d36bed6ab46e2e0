"""An AWS on loopback: Cost Explorer of this project's tests, everything else by moto."""

import os
from collections.abc import Iterator

import pytest
from botocore.config import Config
from moto.server import ThreadedMotoServer

from tests.support.cost_explorer import FakeCostExplorer, cost_explorer
from tests.support.cost_report import (
    NOW,
    Topic,
    create_request_log,
    create_topic,
    november_account,
    shared_clients,
)


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    """Serve DynamoDB, SNS and SQS."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(autouse=True)
def aws_environment(monkeypatch: pytest.MonkeyPatch, moto_url: str) -> None:
    """Let the SDK find test credentials and this AWS, and nothing of whoever runs the tests."""
    for name in list(os.environ):  # noqa: TID251  # what the SDK reads
        if name.upper().startswith(("AWS_", "SNAPKV_")):
            monkeypatch.delenv(name)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "AKIATESTS",
        "AWS_SECRET_ACCESS_KEY": "test-secret",
        "AWS_SESSION_TOKEN": "test-session-token",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_ENDPOINT_URL": moto_url,
    }.items():
        monkeypatch.setenv(name, value)
    # No retries, which wait up to a second; servers that hang have a shorter time in their tests.
    config = Config(
        connect_timeout=10,
        read_timeout=60,
        retries={"mode": "standard", "total_max_attempts": 1},
    )
    monkeypatch.setattr("app.integrations.aws.cost.clients.CLIENT_CONFIG", config)
    for module in ("app.cli.cost", "app.integrations.aws.cost.handler"):
        monkeypatch.setattr(f"{module}.utc_now", lambda: NOW)
        monkeypatch.setattr(f"{module}.AwsClients", shared_clients)


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCostExplorer]:
    """Serve Cost Explorer with November's bill."""
    with cost_explorer(november_account()) as fake:
        monkeypatch.setenv("AWS_ENDPOINT_URL_COST_EXPLORER", fake.address)
        yield fake


@pytest.fixture
def request_log(monkeypatch: pytest.MonkeyPatch) -> str:
    """Create an empty request log, named in the settings."""
    name = create_request_log()
    monkeypatch.setenv("SNAPKV_REQUEST_LOG_TABLE", name)
    return name


@pytest.fixture
def topic(monkeypatch: pytest.MonkeyPatch) -> Topic:
    """Create a topic, named in the settings."""
    created = create_topic()
    monkeypatch.setenv("SNAPKV_COST_TOPIC_ARN", created.arn)
    return created
