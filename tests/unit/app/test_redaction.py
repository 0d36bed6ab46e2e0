"""Secrets do not get into log lines, and what only looks like one stays readable."""

import io
import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from app.telemetry.redaction import MASK, mask_text
from tests.support.logs import captured_log

KEY_ID = "AKIAIOSFODNN7EXAMPLE"
SECRET_KEY = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Capture every log line of the process at the lowest level."""
    with captured_log() as stream:
        yield stream


def only_line(log: io.StringIO) -> dict[str, Any]:
    """Return the one line there is."""
    line: dict[str, Any] = json.loads(log.getvalue())
    return line


@pytest.mark.parametrize(
    "name",
    [
        "authorization",
        "Authorization",
        "proxy-authorization",
        "api_key",
        "apiKey",
        "X-API-Key",
        "openai_api_key",
        "token",
        "X-Amz-Security-Token",
        "aws_session_token",
        "SessionToken",
        "secret",
        "client_secret",
        "SecretAccessKey",
        "aws_secret_access_key",
        "SecretString",
        "password",
        "db_password",
        "set-cookie",
        "api_keys",
        "SNAPKV_API_KEYS",
        "passwords",
        "secrets",
        "credentials",
        "privateKeys",
        "session_tokens",
    ],
)
@pytest.mark.parametrize("value", ["hunter2", b"hunter2", ["hunter2"], {"a": "hunter2"}])
def test_value_under_a_telling_name_is_masked(log: io.StringIO, name: str, value: object) -> None:
    """Whatever its kind, at the top of a line and deeper."""
    structlog.get_logger("t").info("hello", headers={name: value}, **{name: value})
    line = only_line(log)
    assert line[name] == line["headers"][name] == MASK
    assert "hunter2" not in log.getvalue()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("input_tokens", 5),
        ("output_tokens", 0),
        ("time_to_first_token_ms", 21.5),
        ("num_cache_tokens", 1_600),
        ("max_new_tokens", 4),
        ("secret_id", "snapkv/inference-config"),
        ("has_token", True),
        ("token", None),
        ("InputTokens", 7),
        ("TimeToFirstToken", 21.0),
        ("PagesReservedPercent", 12.5),
        ("stack", ["/usr/lib/python3/site-packages/Some/Package1/module.py:12 call"]),
        ("revision", "3b98fb1c5e4d9f1a7c6b2d8e0f1a2b3c4d5e6f70"),
        ("request_id", "req_0123456789abcdef0123456789abcdef"),
        ("trace_id", "1-58406520-a006649127e371903a2de979"),
        ("request_id", SECRET_KEY.replace("/", "0")),
        ("trace_id", SECRET_KEY),
        ("stop_tokens", ["<end>"]),
        ("secret_names", ["a/b"]),
    ],
)
def test_what_is_no_secret_stays(log: io.StringIO, name: str, value: object) -> None:
    """Counts of tokens, names of secrets, hashes and ids."""
    structlog.get_logger("t").info("hello", **{name: value})
    assert only_line(log)[name] == value


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("sent Bearer abcdef123456 to x", f"sent Bearer {MASK} to x"),
        ("sent Basic dXNlcjpwYXNzd29yZA== to x", f"sent Basic {MASK} to x"),
        (f"key {KEY_ID}, ok", f"key {MASK}, ok"),
        (f"key {SECRET_KEY}, ok", f"key {MASK}, ok"),
        ("https://x/?password=hunter2&a=1", f"https://x/?password={MASK}&a=1"),
        ("{'Authorization': b'AWS4-HMAC-SHA256 x'}", f"{{'Authorization': b'{MASK}'}}"),
        ('{\\"api_key\\": \\"hunter2\\"}', f'{{\\"api_key\\": \\"{MASK}\\"}}'),
        ("authorization: Bearer ab", f"authorization: {MASK}"),
        ("Signature=0011aabb, next", f"Signature={MASK}, next"),
        ('{"api_keys": ["hunter2", "hunter3"], "a": 1}', f'{{"api_keys": {MASK}, "a": 1}}'),
        ('{"api_keys": {"ci": "hunter2"}, "a": 1}', f'{{"api_keys": {MASK}, "a": 1}}'),
        ('{"api_keys": [{"a": "hun]t}er2"}, {"b": "x"}]} ok', f'{{"api_keys": {MASK}}} ok'),
        ('{"api_keys": ["hun\\"]ter2"]} ok', f'{{"api_keys": {MASK}}} ok'),
        ('{\\"api_keys\\": [\\"hunter2\\"]} ok', f'{{\\"api_keys\\": {MASK}}} ok'),
        ("api_keys=('hunter2', 'hunter3') ok", f"api_keys={MASK} ok"),
        ('SNAPKV_API_KEYS=["hunter2", "hunter3', f"SNAPKV_API_KEYS={MASK}"),
        ('{"api_key": ["hunter2"]}', f'{{"api_key": {MASK}}}'),
        ("passwords: hunter2", f"passwords: {MASK}"),
        ("secrets=hunter2 ok", f"secrets={MASK} ok"),
        ("GET https://u:hunter2@c/?a=1", f"GET https://u:{MASK}@c/?a=1"),
        ("redis://:hunt@er2@c:6379", f"redis://:{MASK}@c:6379"),
        ("see http://c:8000/a@b", "see http://c:8000/a@b"),
        ("read 12 tokens: fine", "read 12 tokens: fine"),
        ("Application startup complete.", "Application startup complete."),
    ],
)
def test_text_in_the_shape_of_a_key_is_masked(text: str, masked: str) -> None:
    """The rest of the text stays readable."""
    assert mask_text(text) == masked


@pytest.mark.parametrize("size", [100_000])
@pytest.mark.parametrize(
    "unit", ["a", "A1", "secret", "token:", "bearer ", "-", "aA1/", "api_keys:[", "://u:"]
)
def test_long_text_takes_no_long_time(unit: str, size: int) -> None:
    """A library that logs a large text must not stop the event loop for seconds."""
    started_s = time.perf_counter()
    mask_text(unit * (size // len(unit)))
    assert time.perf_counter() - started_s < 1.0


@pytest.mark.parametrize("arguments", [("key %s", KEY_ID), (f"key {KEY_ID}",)])
def test_lines_of_other_libraries_are_masked(log: io.StringIO, arguments: tuple[str, ...]) -> None:
    """A secret in a message or in its arguments."""
    logging.getLogger("some.library").warning(*arguments)
    assert only_line(log)["event"] == f"key {MASK}"


def test_object_without_a_form_in_json_is_masked_too(log: io.StringIO) -> None:
    """It is written as its repr, which quotes what it holds."""
    structlog.get_logger("t").info("hello", config=Holder(f"Bearer {SECRET_KEY}"))
    assert only_line(log)["config"] == f"Holder('Bearer {MASK}')"


class Holder:
    """Something that shows what it holds."""

    def __init__(self, held: str) -> None:
        self.held = held

    def __repr__(self) -> str:
        return f"Holder({self.held!r})"


@pytest.mark.parametrize("name", ["botocore.parsers", "botocore.endpoint", "urllib3.connection"])
def test_debug_lines_that_quote_traffic_are_not_written(log: io.StringIO, name: str) -> None:
    """AWS's client logs bodies of answers at debug level, the values of secrets among them."""
    logging.getLogger(name).debug("Response body: %s", "hunter2")
    assert log.getvalue() == ""


def test_their_level_does_not_fall_below_the_services() -> None:
    """Quieting them at debug must not make them louder at error."""
    with captured_log("error") as log:
        logging.getLogger("botocore.parsers").warning("hello")
        assert log.getvalue() == ""
