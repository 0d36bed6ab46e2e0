"""Clients of AWS: where their region comes from, and that no call of theirs takes for ever."""

import time

import pytest
from botocore.exceptions import ReadTimeoutError

from app.integrations.aws.clients import aws_client
from app.integrations.aws.cost.clients import AwsClients
from app.integrations.aws.s3_client import create_s3_client
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
