"""Clients of AWS: where their region comes from, and that no call of theirs takes for ever."""

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.config import Config
from botocore.exceptions import ReadTimeoutError

from app.integrations.aws.clients import aws_client
from app.integrations.aws.cost.clients import AwsClients
from app.integrations.aws.cost.errors import CostReportError, aws_call
from app.integrations.aws.s3_client import create_s3_client, describe_failure
from app.settings import SettingsError
from tests.support.aws import REGION, ScriptedAws, use_aws


@pytest.fixture(autouse=True)
def somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the account of whoever runs the tests."""
    use_aws(monkeypatch, "http://127.0.0.1:9")


@pytest.mark.parametrize("name", ["AWS_REGION", "AWS_DEFAULT_REGION"])
def test_region_comes_from_either_variable(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Runtimes on AWS set the first, the SDK by itself reads the second."""
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.setenv(name, "eu-west-3")
    assert aws_client("dynamodb").meta.region_name == "eu-west-3"
    assert create_s3_client(max_connections=1).meta.region_name == "eu-west-3"
    assert AwsClients().open("sns").meta.region_name == "eu-west-3"


def test_runtime_wins_over_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in AWS's command line."""
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-3")
    assert aws_client("dynamodb").meta.region_name == REGION


def test_no_region_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says what to set."""
    monkeypatch.delenv("AWS_REGION")
    with pytest.raises(SettingsError, match=r"^AWS dynamodb: no region .* set AWS_REGION$"):
        aws_client("dynamodb")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("AWS_REGION", "hunter2 x", "the region of AWS_REGION, or of the profile, is none"),
        ("AWS_PROFILE", "hunter2", "AWS_PROFILE names a profile that is not there"),
        (
            "AWS_ENDPOINT_URL",
            "user:hunter2@ho st",
            "AWS_ENDPOINT_URL, AWS_ENDPOINT_URL_<SERVICE> or the profile's endpoint is no URL",
        ),
        (
            "AWS_DEFAULTS_MODE",
            "hunter2",
            "the configuration of the AWS SDK is not acceptable (InvalidDefaultsMode)",
        ),
    ],
)
def test_broken_configuration_is_one_line_without_the_value(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str
) -> None:
    """An endpoint may hold a password; neither the message nor a cause of it quotes one."""
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        aws_client("dynamodb")
    assert str(caught.value) == f"AWS dynamodb: {reason}"
    assert caught.value.__suppress_context__


def test_calls_are_bounded_in_time() -> None:
    """Every client has the limits."""
    config = aws_client("secretsmanager").meta.config
    assert (config.connect_timeout, config.read_timeout) == (2.0, 5.0)
    assert config.retries == {"mode": "standard", "total_max_attempts": 3}


def test_silent_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit holds on a real socket."""
    with ScriptedAws(lambda _body: (200, {})) as aws:
        aws.answer = aws.hang
        use_aws(monkeypatch, aws.url)
        client = aws_client("dynamodb", read_timeout_s=0.2, max_attempts=1)
        begun_s = time.monotonic()
        with pytest.raises(ReadTimeoutError):
            client.list_tables()
        assert time.monotonic() - begun_s < 5


@pytest.fixture
def silent_sts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Turn a pod's token into credentials at an address that takes connections and says nothing."""
    token = tmp_path / "token"
    token.write_text("token", encoding="utf-8")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/snapkv")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield


@pytest.mark.timeout(30)
@pytest.mark.usefixtures("silent_sts")
@pytest.mark.parametrize(
    "call",
    [
        lambda: aws_client("dynamodb", read_timeout_s=0.2, max_attempts=1).list_tables(),
        lambda: create_s3_client(
            max_connections=1, read_timeout_s=0.2, max_attempts=1
        ).list_buckets(),
    ],
    ids=["aws_client", "s3"],
)
def test_silent_source_of_credentials_is_given_up(call: Callable[[], Any]) -> None:
    """The SDK's own client for credentials has the limits too."""
    begun_s = time.monotonic()
    with pytest.raises(ReadTimeoutError) as caught:
        call()
    assert time.monotonic() - begun_s < 10
    assert describe_failure(caught.value) == "AWS did not answer in time (ReadTimeoutError)"


@pytest.mark.timeout(30)
@pytest.mark.usefixtures("silent_sts")
def test_report_gives_a_silent_source_of_credentials_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As every other call of the report."""
    config = Config(read_timeout=0.2, retries={"mode": "standard", "total_max_attempts": 1})
    monkeypatch.setattr("app.integrations.aws.cost.clients.CLIENT_CONFIG", config)
    with (
        pytest.raises(CostReportError, match=r"^sns:ListTopics: did not answer in time$"),
        aws_call("sns:ListTopics"),
    ):
        AwsClients().open("sns").list_topics()
