"""Settings from a secret: what it may hold, how failures are told, and that it is never quoted."""

import json
import logging
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import SecretStr

from app.integrations.aws import clients
from app.integrations.aws.secrets import SecretReader, parse_secret
from app.settings import SettingsError
from tests.support.aws import ScriptedAws, error, moto_server, plain_client, use_aws
from tests.support.logs import captured_log

KEY = "sk-live-0123456789abcdef"
OTHER = "sk-live-fedcba9876543210"
SECRET_ID = "snapkv/inference-config"


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    """Run moto's server."""
    with moto_server() as url:
        yield url


@pytest.fixture(scope="module")
def secrets(moto: str) -> Any:
    """Return a client to make secrets with."""
    return plain_client("secretsmanager", moto)


@pytest.fixture(scope="module")
def reader(moto: str) -> SecretReader:
    """Return a reader that has made its client, which takes longer than most tests."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_aws(monkeypatch, moto)
        reader = SecretReader()
        with pytest.raises(SettingsError):
            reader.read("nothing-yet")
        return reader


def plain(values: dict[str, object]) -> dict[str, object]:
    """Uncover the keys."""
    keys = values.get("api_keys")
    if not isinstance(keys, dict):
        return values
    return values | {"api_keys": {name: key.get_secret_value() for name, key in keys.items()}}


def shown(error: BaseException) -> str:
    """Return all that a log, a debugger or a traceback shows of an error."""
    lines = traceback.format_exception(error)
    seen: BaseException | None = error
    while seen is not None:
        lines += [str(seen), repr(seen), repr(vars(seen))]
        seen = seen.__cause__ or seen.__context__
    return "\n".join(lines)


def test_every_setting_of_a_secret() -> None:
    """Each name reaches its field."""
    document = {
        "max_capacity_prompt": 1_024,
        "window_size": 16,
        "kernel_size": 7,
        "method": "snapkv",
        "pooling": "max",
        "model_name": "owner/name",
        "api_keys": {"team-a": KEY, "team-b": OTHER},
    }
    expected = {
        "max_capacity_prompt": 1_024,
        "window_size": 16,
        "kernel_size": 7,
        "method": "snapkv",
        "pooling": "max",
        "model": "owner/name",
        "api_keys": {"team-a": KEY, "team-b": OTHER},
    }
    assert plain(parse_secret(json.dumps(document))) == expected


def test_values_as_the_console_writes_them() -> None:
    """Its editor for names and values makes text of everything."""
    document = {"max_capacity_prompt": "1024", "api_keys": json.dumps([KEY, OTHER])}
    assert plain(parse_secret(json.dumps(document))) == {
        "max_capacity_prompt": 1_024,
        "api_keys": {"key-1": KEY, "key-2": OTHER},
    }


def test_empty_object_sets_nothing() -> None:
    """A secret that waits for its content is no error."""
    assert parse_secret("{}") == {}


MALFORMED = [
    (f'{{"api_keys": ["{KEY}"]', "it does not hold JSON"),
    (KEY, "it does not hold JSON"),
    (" ", "it does not hold JSON"),
    ("[" * 60_000, "it does not hold JSON"),
    (f'["{KEY}"]', "it must hold a JSON object"),
    (f'"{KEY}"', "it must hold a JSON object"),
    (f'{{"window_size": "{KEY}"}}', "window_size: must be an integer"),
    ('{"window_size": 16.0}', "window_size: must be an integer"),
    ('{"window_size": true}', "window_size: must be an integer"),
    ('{"window_size": null}', "window_size: must be an integer"),
    ('{"window_size": NaN}', "window_size: must be an integer"),
    ('{"window_size": "-1"}', "window_size: must be an integer"),
    (f'{{"method": "{KEY}"}}', "method: must be one of full, snapkv"),
    (f'{{"pooling": ["{KEY}"]}}', "pooling: must be one of avg, max"),
    ('{"model_name": " "}', "model_name: must be text that is not empty"),
    (f'{{"model_name": ["{KEY}"]}}', "model_name: must be text that is not empty"),
    (f'{{"hf_token": "{KEY}"}}', "hf_token: is no setting; known are max_capacity_prompt"),
    (f'{{"{KEY}": "team"}}', "a name that is not shown: is no setting"),
    (f'{{"api_keys": "{KEY}"}}', "api_keys: is not JSON"),
    ('{"api_keys": 7}', "api_keys: must be a list of keys, or an object"),
    (f'{{"api_keys": ["{KEY}", 7]}}', "api_keys: key 2 must be 16 to 512 visible"),
    (f'{{"api_keys": ["{KEY}\\n"]}}', "api_keys: key 1 must be 16 to 512 visible"),
    (f'{{"api_keys": ["{KEY}é"]}}', "api_keys: key 1 must be 16 to 512 visible"),
    ('{"api_keys": ["short"]}', "api_keys: key 1 must be 16 to 512 visible"),
    (f'{{"api_keys": {{"{KEY}": "team-a"}}}}', "api_keys: key 1 must be 16 to 512 visible"),
    (f'{{"api_keys": {{"team a": "{KEY}"}}}}', "api_keys: the name of key 1 must be"),
    (f'{{"api_keys": ["{OTHER}", "{KEY}", "{OTHER}"]}}', "api_keys: key 3 is there twice"),
]


@pytest.mark.parametrize(("text", "reason"), MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_secret_is_one_line_without_its_content(
    secrets: Any, reader: SecretReader, text: str, reason: str
) -> None:
    """Names the secret and the reason, and shows nothing of what it holds."""
    name = f"malformed-{abs(hash(text))}"
    secrets.create_secret(Name=name, SecretString=text)
    with captured_log("debug") as log, pytest.raises(SettingsError) as caught:
        reader.read(name)
    assert str(caught.value).startswith(f"secret {name}: {reason}")
    assert "\n" not in str(caught.value)
    for hidden in (KEY, OTHER, "short"):
        assert hidden not in shown(caught.value)
        assert hidden not in log.getvalue()


def test_read_through_the_sdk(secrets: Any, reader: SecretReader) -> None:
    """By name and by ARN; a new value is seen by the next read."""
    name = "snapkv/read-through-the-sdk"
    arn = secrets.create_secret(Name=name, SecretString='{"kernel_size": 5}')["ARN"]
    assert reader.read(name) == reader.read(arn) == {"kernel_size": 5}
    secrets.put_secret_value(SecretId=name, SecretString='{"kernel_size": 9}')
    assert reader.read(name) == {"kernel_size": 9}


def test_binary_secret(secrets: Any, reader: SecretReader) -> None:
    """Text was expected."""
    secrets.create_secret(Name="binary", SecretBinary=KEY.encode())
    with pytest.raises(SettingsError, match=r"^secret binary: it holds binary data") as caught:
        reader.read("binary")
    assert KEY not in shown(caught.value)


def test_missing_secret(reader: SecretReader) -> None:
    """The region is named among the reasons: it is the usual one."""
    with pytest.raises(SettingsError, match=r"^secret nowhere: there is no such secret.*region$"):
        reader.read("nowhere")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (error("AccessDeniedException"), "access is denied; .*secretsmanager:GetSecretValue"),
        (error("DecryptionFailure"), "cannot be decrypted; .*kms:Decrypt"),
        (error("InvalidRequestException"), "scheduled for deletion"),
        (error("ThrottlingException"), r"AWS refused to give it \(ThrottlingException\)"),
        (error("InternalServiceError", 500), r"AWS refused to give it \(InternalServiceError\)"),
        (lambda _body: (502, f"<html>{KEY}".encode()), r"AWS refused to give it \(502\)"),
        (
            lambda _body: (400, {"__type": f"{KEY} {KEY}"}),
            r"AWS refused to give it \(unknown\)",
        ),
        (lambda _body: (200, f"<html>{KEY}".encode()), "the answer was not understood"),
        (lambda _body: (200, b"\xff"), "the answer was not understood"),
        (lambda _body: (200, [KEY]), "the answer was not understood"),
        (lambda _body: (200, {}), "the answer was not understood"),
    ],
)
def test_failures_of_aws_are_one_line(
    monkeypatch: pytest.MonkeyPatch, answer: Any, reason: str
) -> None:
    """Says what the operator can do about it, where anything."""
    with ScriptedAws(answer) as aws, captured_log() as log:
        use_aws(monkeypatch, aws.url)
        with pytest.raises(SettingsError, match=f"^secret {SECRET_ID}: .*{reason}") as caught:
            one_attempt(monkeypatch).read(SECRET_ID)
    assert "\n" not in str(caught.value)
    assert KEY not in shown(caught.value)
    assert KEY not in log.getvalue()


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused connection names the SDK's error."""
    use_aws(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(SettingsError, match=r"AWS cannot be reached \(EndpointConnectionError\)"):
        one_attempt(monkeypatch).read(SECRET_ID)


def test_silent_secrets_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that hangs ends with a reason."""
    with ScriptedAws(lambda _body: (200, {})) as aws:
        aws.answer = aws.hang
        use_aws(monkeypatch, aws.url)
        with pytest.raises(SettingsError, match=r"AWS cannot be reached \(ReadTimeoutError\)"):
            one_attempt(monkeypatch, read_timeout_s=0.2).read(SECRET_ID)


def test_no_credentials(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain found none."""
    use_aws(monkeypatch, moto)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(SettingsError, match="no AWS credentials were found"):
        SecretReader().read(SECRET_ID)


def test_no_region(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client says what to set."""
    use_aws(monkeypatch, moto)
    monkeypatch.delenv("AWS_REGION")
    with pytest.raises(SettingsError, match="set AWS_REGION"):
        SecretReader().read(SECRET_ID)


def test_keys_are_covered(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK's debug lines would quote the answer; what is returned shows no key either."""
    use_aws(monkeypatch, moto)
    client = plain_client("secretsmanager", moto)
    client.create_secret(Name="covered", SecretString=json.dumps({"api_keys": [KEY]}))
    with captured_log("debug") as log:
        for name in ("boto3", "botocore"):  # as they are before logging is set up
            logging.getLogger(name).setLevel(logging.NOTSET)
        logging.getLogger("snapkv.test").debug("the level is kept")
        values = SecretReader().read("covered")
    assert values["api_keys"] == {"key-1": SecretStr(KEY)}
    assert KEY not in repr(values)
    assert "the level is kept" in log.getvalue()
    assert KEY not in log.getvalue()


def one_attempt(monkeypatch: pytest.MonkeyPatch, read_timeout_s: float = 5.0) -> SecretReader:
    """Return a reader that does not try again, which would only take longer."""
    monkeypatch.setattr(
        "app.integrations.aws.secrets.aws_client",
        lambda service: clients.aws_client(service, read_timeout_s=read_timeout_s, max_attempts=1),
    )
    return SecretReader()
