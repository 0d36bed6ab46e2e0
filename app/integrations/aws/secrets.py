"""Reads the settings that a Secrets Manager secret holds.

No error of this file quotes the secret, and none keeps an exception that holds its text.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from app.integrations.aws.clients import aws_client
from app.integrations.aws.error_code import error_code
from app.setting_groups.access import parse_api_keys
from app.setting_groups.key_limits import parse_key_limits
from app.settings import SettingsError
from snapkv_core import COMPRESSION_METHODS, POOLINGS

#: What the error codes mean that an operator can do something about.
_REASONS: Final[Mapping[str, str]] = {
    "AccessDeniedException": "access is denied; the role needs secretsmanager:GetSecretValue, and "
    "kms:Decrypt where the secret has a key of its own",
    "DecryptionFailure": "it cannot be decrypted; the role needs kms:Decrypt for its key",
    "InvalidRequestException": "it cannot be read as it is; it may be scheduled for deletion",
    "ResourceNotFoundException": "there is no such secret, or it has no value yet, in this account "
    "and region",
}

#: The console's editor for names and values writes every value as text.
_DIGITS: Final = re.compile(r"[0-9]{1,9}")
#: Other names may be a key that was put into the wrong place.
_PRINTABLE_NAME: Final = re.compile(r"[a-z_]{1,40}")


class SecretReader:
    """Reads secrets; the SDK's client is made once, at the first read."""

    def __init__(self) -> None:
        """Reach nothing yet."""
        self._client: Any = None

    def read(self, secret_id: str) -> dict[str, object]:
        """Return the settings of a secret by field name of `Settings`; blocking.

        Args:
            secret_id: Its name or ARN.

        Raises:
            SettingsError: It cannot be read, or holds something else than settings. The message is
                one line with its name and the reason.
        """
        if self._client is None:
            self._client = aws_client("secretsmanager")
        try:
            return parse_secret(self._fetch(secret_id))
        except ValueError as error:
            raise SettingsError(f"secret {secret_id}: {error}") from None

    def _fetch(self, secret_id: str) -> str:
        answer: Mapping[str, object] = {}
        reason = "the answer was not understood"
        try:
            answer = self._client.get_secret_value(SecretId=secret_id)
        except ClientError as error:
            reason = _reason_of(error)
        except NoCredentialsError:
            reason = "no AWS credentials were found"
        except BotoCoreError as error:
            reason = f"AWS cannot be reached ({type(error).__name__})"
        except Exception:  # whatever the SDK's parser meets in an answer that is not AWS's
            pass
        text = answer.get("SecretString")
        if isinstance(text, str):
            return text
        if "SecretBinary" in answer:
            reason = "it holds binary data; it must hold JSON text"
        # Out here, so that the error keeps none of the exceptions above, which may quote an answer.
        raise ValueError(reason)


def parse_secret(text: str) -> dict[str, object]:
    """Return the settings in a secret's text by field name of `Settings`.

    Raises:
        ValueError: It holds something else; the message quotes nothing but names of settings.
    """
    document = _json_of(text)
    if not isinstance(document, dict):
        raise ValueError("it must hold a JSON object")
    values: dict[str, object] = {}
    for name, value in document.items():
        if name not in _FIELDS:
            shown = name if _PRINTABLE_NAME.fullmatch(name) else "a name that is not shown"
            raise ValueError(f"{shown}: is no setting; known are {', '.join(_FIELDS)}")
        field, parse = _FIELDS[name]
        try:
            values[field] = parse(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return values


def _json_of(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        # The decoder's error holds the text.
        reason = "it does not hold JSON"
    raise ValueError(reason)


def _reason_of(error: ClientError) -> str:
    code = error_code(error)
    return _REASONS.get(code) or f"AWS refused to give it ({code})"


def _integer(value: object) -> int:
    if isinstance(value, str) and _DIGITS.fullmatch(value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError("must be an integer")


def _text(value: object) -> str:
    if isinstance(value, str) and value.strip():
        return value
    raise ValueError("must be text that is not empty")


def _one_of(choices: tuple[str, ...]) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if isinstance(value, str) and value in choices:
            return value
        raise ValueError(f"must be one of {', '.join(choices)}")

    return parse


#: Name in the secret -> field of `Settings`, and what checks a value.
_FIELDS: Final[Mapping[str, tuple[str, Callable[[object], object]]]] = {
    "max_capacity_prompt": ("max_capacity_prompt", _integer),
    "window_size": ("window_size", _integer),
    "kernel_size": ("kernel_size", _integer),
    "method": ("method", _one_of(COMPRESSION_METHODS)),
    "pooling": ("pooling", _one_of(POOLINGS)),
    "model_name": ("model", _text),
    "api_keys": ("api_keys", parse_api_keys),
    "key_limits": ("key_limits", parse_key_limits),
}
