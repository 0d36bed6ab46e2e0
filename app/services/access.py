"""Who calls: knows API keys by their hashes, and never keeps a key."""

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from typing import Final

from pydantic import SecretStr

from app.setting_groups.access import KEY_DIGEST

#: The one caller where no keys are asked for.
ANYBODY: Final = "default"
_BEARER: Final = re.compile(r"bearer +([!-~]{1,512})", re.IGNORECASE)


class AccessDeniedError(Exception):
    """A request came without a key, or with one that is not known; which of them is not said."""

    def __init__(self) -> None:
        super().__init__("a known API key is needed, as the header Authorization: Bearer KEY")


class AccessControl:
    """Tells callers apart by their keys; without keys everybody is the same caller.

    Used on the event loop.
    """

    def __init__(self, keys: Mapping[str, SecretStr]) -> None:
        """Take the keys, by the names of those who have them."""
        self._names: dict[bytes, str] = {}
        self.use_keys(keys)

    @property
    def asks_for_keys(self) -> bool:
        """Whether requests need a key."""
        return bool(self._names)

    def use_keys(self, keys: Mapping[str, SecretStr]) -> None:
        """Replace the keys, from the next request on."""
        self._names = {_digest_of(key.get_secret_value()): name for name, key in keys.items()}

    def caller_of(self, authorization: Sequence[str]) -> str:
        """Return the name of who sent these `Authorization` headers.

        Raises:
            AccessDeniedError: Keys are asked for, and this is not one header with one of them.
        """
        if not self._names:
            return ANYBODY
        match = _BEARER.fullmatch(authorization[0]) if len(authorization) == 1 else None
        given = hashlib.sha256(match[1].encode() if match else b"").digest()
        # All of them are compared, each in constant time: no time tells how near a guess was.
        found = [name for known, name in self._names.items() if hmac.compare_digest(known, given)]
        if match is None or not found:
            raise AccessDeniedError
        return found[0]


def namespace_of(caller: str) -> str:
    """Return the namespace of a caller's snapshots, which stores take; of nobody else."""
    if caller == ANYBODY:
        return ANYBODY
    return hashlib.sha256(caller.encode()).hexdigest()[:32]


def _digest_of(key: str) -> bytes:
    given = KEY_DIGEST.fullmatch(key)
    return bytes.fromhex(given[1]) if given else hashlib.sha256(key.encode()).digest()
