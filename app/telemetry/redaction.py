"""Masks secrets in log lines: values under telling names, and text in the shape of a key.

It sees every line last, ours and other libraries' alike, and knows nothing of what they mean.
"""

import functools
import re
from typing import Any, Final

from structlog.typing import EventDict, WrappedLogger

MASK: Final = "[redacted]"

#: Ids that are checked where they come in: a caller's may well look like a secret key.
_CHECKED_IDS: Final = frozenset({"request_id", "trace_id"})
#: Names, in snake case, whose whole value is a secret, also with an `s`.
_SECRET_NAMES: Final = frozenset(
    {
        "apikey",
        "authorization",
        "cookie",
        "credential",
        "passwd",
        "proxy_authorization",
        "secret_binary",
        "secret_key",
        "secret_string",
        "set_cookie",
        "signature",
    }
)
#: The last words of other such names.
_SECRET_ENDINGS: Final = tuple(
    f"_{name}"
    for name in (
        "access_token",
        "api_key",
        "auth_token",
        "password",
        "private_key",
        "secret",
        "secret_access_key",
        "session_token",
    )
)
_WORD_BORDER: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[-. ]")

#: What a scheme of HTTP authentication is followed by.
_CREDENTIALS: Final = re.compile(r"\b(bearer\s+)[\w.~+/=-]{8,}|\b(basic\s+)[\w+/]{16,}=*", re.I)
#: `password=...`, `"api_key": "..."`, also in JSON within a string.
_NAME: Final = (
    r"(?P<name>(?:authorization|api[_-]?keys?|private[_-]?keys?|credentials?"
    r"|secret(?:[_-]?(?:access[_-]?)?key|[_-]?string)?s?"
    r"|passwords?|passwd|(?:access|auth|session)[_-]?tokens|token|signature)"
    r"(?:\\{0,7}[\"'])?\s{0,3}[:=]\s{0,3}(?:b?\\{0,7}[\"'])?)"
)
_NAMED_VALUE: Final = re.compile(
    rf"{_NAME}(?:(?:bearer|basic|aws4-hmac-sha256)\s+)?[^\s\"',;&}}\\]+", re.I
)
#: `api_keys=[...]`, `"passwords": {...}`: where the value ends, `_end_of_group` finds.
_NAMED_GROUP: Final = re.compile(rf"{_NAME}(?=[\[{{(])", re.I)
#: What a group is made of: brackets, and quotes with the backslashes before them.
_GROUP_PART: Final = re.compile(r"(?<!\\)\\*[\"']|[\[{(\]})]")
#: `https://user:password@host`.
_URL_PASSWORD: Final = re.compile(r"(://[^\s/:@?#\"']*:)[^\s/?#\"']+(?=@)")
#: One of these is in every text that the patterns above match, but that of URLs; looking for them
#: is cheaper.
_HINTS: Final = (
    "basic",
    "bearer",
    "auth",
    "credential",
    "key",
    "secret",
    "passw",
    "token",
    "signature",
)
_AWS_KEY_ID: Final = re.compile(r"(?<![A-Za-z0-9])A[KS]IA[A-Z0-9]{16}(?![A-Za-z0-9])")
_SECRET_KEY_CHARS: Final = 40
#: Forty characters of all three kinds: a hash in hexadecimal has no capitals, a path rarely both.
_AWS_SECRET_KEY: Final = re.compile(
    r"(?<![A-Za-z0-9/+=])(?=[A-Za-z0-9/+]{0,39}[A-Z])(?=[A-Za-z0-9/+]{0,39}[a-z])"
    r"(?=[A-Za-z0-9/+]{0,39}[0-9])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])"
)


def redact(logger: WrappedLogger, method_name: str, event_dict: EventDict) -> EventDict:
    """Mask the secrets of a line; a structlog processor."""
    return {
        name: value if name in _CHECKED_IDS else _masked(name, value)
        for name, value in event_dict.items()
    }


def mask_text(text: str) -> str:
    """Mask whatever in a text has the shape of a key or stands behind a telling name."""
    if _may_hold_secrets(text):
        text = _CREDENTIALS.sub(lambda match: f"{match[1] or match[2]}{MASK}", text)
        text = _NAMED_VALUE.sub(rf"\g<name>{MASK}", _mask_groups(text))
    if "://" in text:
        text = _URL_PASSWORD.sub(rf"\1{MASK}", text)
    if "AKIA" in text or "ASIA" in text:
        text = _AWS_KEY_ID.sub(MASK, text)
    return _AWS_SECRET_KEY.sub(MASK, text) if len(text) >= _SECRET_KEY_CHARS else text


def _may_hold_secrets(text: str) -> bool:
    # A loop, as `any` takes three times as long, and every line of the log comes by here.
    lowered = text.lower()
    for hint in _HINTS:  # noqa: SIM110
        if hint in lowered:
            return True
    return False


def _mask_groups(text: str) -> str:
    masked, done = [], 0
    while match := _NAMED_GROUP.search(text, done):
        masked += [text[done : match.end()], MASK]
        done = _end_of_group(text, match.end())
    return "".join([*masked, text[done:]])


def _end_of_group(text: str, start: int) -> int:
    """Return where the bracket at `start` is closed again; the text's end when it is not."""
    depth, quote = 0, ""
    for part in _GROUP_PART.finditer(text, start):
        if quote:
            # One with more backslashes before it is part of the string.
            quote = "" if part[0] == quote else quote
        elif part[0] in ("[", "{", "("):
            depth += 1
        elif part[0] in ("]", "}", ")"):
            depth -= 1
            if depth == 0:
                return part.end()
        else:
            quote = part[0]
    return len(text)


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
    # In the plural, tokens are pieces of text, unless it is said what they are for.
    if f"_{snake}".endswith("_token"):
        return True
    singular = snake.removesuffix("s")
    return singular in _SECRET_NAMES or f"_{singular}".endswith(_SECRET_ENDINGS)
