"""Tokens for ElastiCache: their parts, and their signature against the algorithm written out."""

import hashlib
import hmac
import logging
from urllib.parse import parse_qsl, quote

import pytest

from app.integrations.aws.elasticache_token import ElastiCacheTokens
from snapkv_core import StoreError
from tests.support.aws import REGION, use_aws

SECRET_KEY = "testing"


@pytest.fixture(autouse=True)
def account(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the account of whoever runs the tests."""
    use_aws(monkeypatch, "http://127.0.0.1:9")


def parts_of(token: str) -> tuple[str, dict[str, str]]:
    """Take a token apart: the cache's name and the parameters."""
    name, _, query = token.partition("/?")
    return name, dict(parse_qsl(query, strict_parsing=True))


def signature_by_hand(name: str, parameters: dict[str, str]) -> str:
    """Sign as the description of Signature Version 4 says, for a presigned GET."""
    unsigned = {key: value for key, value in parameters.items() if key != "X-Amz-Signature"}
    query = "&".join(
        f"{quote(key, safe='-_.~')}={quote(value, safe='-_.~')}"
        for key, value in sorted(unsigned.items())
    )
    empty_body = hashlib.sha256(b"").hexdigest()
    request = f"GET\n/\n{query}\nhost:{name}\n\nhost\n{empty_body}"
    scope = parameters["X-Amz-Credential"].partition("/")[2]
    hashed = hashlib.sha256(request.encode()).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{parameters['X-Amz-Date']}\n{scope}\n{hashed}"
    key = f"AWS4{SECRET_KEY}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.digest(key, text.encode(), "sha256").hex()


def test_token_is_a_signed_address_without_its_scheme() -> None:
    """User, region, service and a life of 15 minutes are signed."""
    user, token = ElastiCacheTokens("my-cache", "snapkv", is_serverless=False).get_credentials()
    name, parameters = parts_of(token)
    assert (user, name) == ("snapkv", "my-cache")
    day = parameters["X-Amz-Date"][:8]
    assert parameters == {
        "Action": "connect",
        "User": "snapkv",
        "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
        "X-Amz-Credential": f"testing/{day}/{REGION}/elasticache/aws4_request",
        "X-Amz-Date": parameters["X-Amz-Date"],
        "X-Amz-Expires": "900",
        "X-Amz-SignedHeaders": "host",
        "X-Amz-Signature": signature_by_hand(name, parameters),
    }


def test_token_of_a_serverless_cache_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a role's session is part of what is signed; names are in lower case."""
    session = "a/session+token=="
    monkeypatch.setenv("AWS_SESSION_TOKEN", session)
    _, token = ElastiCacheTokens("My-Cache", "snap kv", is_serverless=True).get_credentials()
    name, parameters = parts_of(token)
    assert name == "my-cache"
    assert parameters["ResourceType"] == "ServerlessCache"
    assert parameters["User"] == "snap kv"
    assert parameters["X-Amz-Security-Token"] == session
    assert parameters["X-Amz-Signature"] == signature_by_hand(name, parameters)


def test_every_login_gets_a_token_of_the_credentials_there_are_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are asked for each time, since the SDK renews them."""
    tokens = ElastiCacheTokens("my-cache", "snapkv", is_serverless=False)
    tokens.get_credentials()

    class Renewed:
        access_key, secret_key, token = "renewed", "other", None

        def get_frozen_credentials(self) -> "Renewed":
            return self

    monkeypatch.setattr("boto3.session.Session.get_credentials", lambda _self: Renewed())
    _, parameters = parts_of(tokens.get_credentials()[1])
    assert parameters["X-Amz-Credential"].startswith("renewed/")


def test_missing_region_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the store is made, not at its first call."""
    monkeypatch.delenv("AWS_REGION")
    with pytest.raises(StoreError, match="set AWS_REGION"):
        ElastiCacheTokens("my-cache", "snapkv", is_serverless=False)


def test_missing_credentials_are_a_failure_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be there at the next call."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    tokens = ElastiCacheTokens("my-cache", "snapkv", is_serverless=False)
    with pytest.raises(StoreError, match=r"^valkey: there are no AWS credentials$"):
        tokens.get_credentials()


def test_signature_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever level the application logs at."""
    caplog.set_level(logging.DEBUG)
    ElastiCacheTokens("my-cache", "snapkv", is_serverless=False).get_credentials()
    assert "my-cache" not in caplog.text
