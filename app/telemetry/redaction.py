"""Masks secrets in log lines: values under telling names, and text in the shape of a key.

It sees every line last, ours and other libraries' alike, and knows nothing of what they mean.
"""

import functools
import re
from typing import Any, Final

from structlog.typing import EventDict, WrappedLogger

MASK: Final = "[redacted]"

#: Names, in snake case, whose whole value is a secret. `input_tokens` is none of them.
_SECRET_NAMES: Final = frozenset(
    {
        "api_key",
        "apikey",
        "authorization",
        "cookie",
        "credentials",
        "passwd",
        "password",
        "proxy_authorization",
        "secret",
        "secret_access_key",
        "secret_binary",
        "secret_key",
        "secret_string",
        "set_cookie",
        "signature",
        "token",
    }
)
_SECRET_ENDINGS: Final = tuple(
    f"_{name}"
    for name in ("api_key", "password", "private_key", "secret", "secret_access_key", "token")
)
_WORD_BORDER: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[-. ]")

#: What a scheme of HTTP authentication is followed by.
_CREDENTIALS: Final = re.compile(r"\b(bearer\s+)[\w.~+/=-]{8,}|\b(basic\s+)[\w+/]{16,}=*", re.I)
#: `password=...`, `"api_key": "..."`, also in JSON within a string.
_NAMED_VALUE: Final = re.compile(
    r"(?P<name>(?:authorization|api[_-]?key|secret(?:[_-]?(?:access[_-]?)?key|[_-]?string)?"
    r"|password|passwd|token|signature)(?:\\?[\"'])?\s{0,3}[:=]\s{0,3}(?:b?\\?[\"'])?)"
    r"(?:(?:bearer|basic|aws4-hmac-sha256)\s+)?[^\s\"',;&}\\]+",
    re.I,
)
#: One of these is in every text that the first two patterns match; looking for them is cheaper.
_HINTS: Final = ("basic", "bearer", "auth", "key", "secret", "passw", "token", "signature")
_AWS_KEY_ID: Final = re.compile(r"(?<![A-Za-z0-9])A[KS]IA[A-Z0-9]{16}(?![A-Za-z0-9])")
_SECRET_KEY_CHARS: Final = 40
#: Forty characters of all three kinds: a hash in hexadecimal has no capitals, a path rarely both.
_AWS_SECRET_KEY: Final = re.compile(
    r"(?<![A-Za-z0-9/+=])(?=[A-Za-z0-9/+]{0,39}[A-Z])(?=[A-Za-z0-9/+]{0,39}[a-z])"
    r"(?=[A-Za-z0-9/+]{0,39}[0-9])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])"
)


def redact(logger: WrappedLogger, method_name: str, event_dict: EventDict) -> EventDict:
    """Mask the secrets of a line; a structlog processor."""
    return {name: _masked(name, value) for name, value in event_dict.items()}


def mask_text(text: str) -> str:
    """Mask whatever in a text has the shape of a key or stands behind a telling name."""
    lowered = text.lower()
    if any(hint in lowered for hint in _HINTS):
        text = _CREDENTIALS.sub(lambda match: f"{match[1] or match[2]}{MASK}", text)
        text = _NAMED_VALUE.sub(rf"\g<name>{MASK}", text)
    if "AKIA" in text or "ASIA" in text:
        text = _AWS_KEY_ID.sub(MASK, text)
    return _AWS_SECRET_KEY.sub(MASK, text) if len(text) >= _SECRET_KEY_CHARS else text


def _masked(name: str, value: Any) -> Any:
    # A number is a measurement, whatever its name: `TimeToFirstToken` must stay one.
    is_harmless = value is None or isinstance(value, int | float)
    return value if is_harmless else MASK if _is_secret(name) else _masked_within(value)


def _masked_within(value: Any) -> Any:
    if isinstance(value, str):
        return mask_text(value)
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, dict):
        return {key: _masked(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked_within(item) for item in value]
    # The renderer would write any other object as its repr, after this.
    return mask_text(repr(value))


@functools.lru_cache(maxsize=1_024)
def _is_secret(name: str) -> bool:
    snake = _WORD_BORDER.sub("_", name).lower()
    return snake in _SECRET_NAMES or snake.endswith(_SECRET_ENDINGS)
