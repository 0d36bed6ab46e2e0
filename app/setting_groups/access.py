"""Settings of who may call the service, and the form in which keys are given.

No message of this file quotes what it was given.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, Field, SecretStr
from pydantic_settings import NoDecode

#: Shorter keys can be guessed; longer ones do not fit into a header of every proxy.
_KEY: Final = re.compile(r"[!-~]{16,512}")
#: In place of a key, so that none need be written down.
KEY_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")
#: Addresses that nobody on another machine can reach.
_LOOPBACK: Final = re.compile(r"localhost|127(\.[0-9]{1,3}){3}|::1", re.IGNORECASE)
KEY_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


def parse_api_keys(value: object) -> object:
    """Return keys by name from a list, from names and keys, or from the JSON text of either.

    Keys of a list are named `key-1`, `key-2` and so on.

    Raises:
        ValueError: It is none of these, or a name or a key is not acceptable; says which by its
            position.
    """
    if isinstance(value, str):
        value = _from_json(value)
    if isinstance(value, list | tuple):
        value = {f"key-{number}": key for number, key in enumerate(value, 1)}
    if not isinstance(value, Mapping):
        raise ValueError("must be a list of keys, or an object of names and keys")
    keys: dict[str, SecretStr] = {}
    seen: set[str] = set()
    for number, (name, given) in enumerate(value.items(), 1):
        key = given.get_secret_value() if isinstance(given, SecretStr) else given
        if not isinstance(name, str) or KEY_NAME.fullmatch(name) is None:
            raise ValueError(
                f"the name of key {number} must be 1 to 64 letters, digits, dots, dashes or "
                "underscores"
            )
        if not isinstance(key, str) or _KEY.fullmatch(key) is None:
            raise ValueError(f"key {number} must be 16 to 512 visible ASCII characters")
        if key in seen:
            raise ValueError(f"key {number} is there twice")
        seen.add(key)
        keys[name] = SecretStr(key)
    return keys


def _from_json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        # The decoder's error holds the text.
        reason = "is not JSON"
    raise ValueError(reason)


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach an address."""
    return _LOOPBACK.fullmatch(host) is not None


class AccessSettings(BaseModel):
    """Who may call the service."""

    api_keys: Annotated[dict[str, SecretStr], NoDecode, BeforeValidator(parse_api_keys)] = Field(
        {},
        description="API keys as JSON, a list or an object of names and keys; a key may be given "
        "as `sha256:` and its hash. Without keys everybody may call.",
    )
    auth: Literal["auto", "keys", "off"] = Field(
        "auto",
        description="Whether callers need a key: `keys` does not start without any; `auto` asks "
        "for keys where there are some; `off` asks nobody. Without keys the server "
        "listens on loopback addresses only.",
    )

    @property
    def keys_in_force(self) -> dict[str, SecretStr]:
        """The keys that callers are asked for; none where nobody is asked."""
        return {} if self.auth == "off" else self.api_keys
