"""Logins whose password changes: a new one for each connection, and a new one in time."""

from collections.abc import Iterator
from typing import Any

import pytest

from app.integrations.valkey.connection import LOGIN_AGE_S
from app.integrations.valkey.store import ValkeyStore
from snapkv_core import StoreError
from tests.support.redis_server import RedisServer
from tests.support.stores import KEY, valkey_config

USER = "renewing"

pytestmark = pytest.mark.slow


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


class Tokens:
    """Stands for tokens that are good once, as far as the server lets it be seen.

    Attributes:
        num_given: How many were asked for.
        failure: Raised instead of giving one.
    """

    def __init__(self, admin: Any) -> None:
        self.num_given = 0
        self.failure: Exception | None = None
        self._admin = admin

    def get_credentials(self) -> tuple[str, str]:
        """Make the next password the only one that the server takes."""
        if self.failure is not None:
            raise self.failure
        self.num_given += 1
        password = f"token-{self.num_given}"
        self._admin.execute_command(
            "ACL", "SETUSER", USER, "on", "resetpass", f">{password}", "~snapkv:*", "+@all"
        )
        return USER, password


class Connections:
    """What the server knows of the store's connections."""

    def __init__(self, admin: Any) -> None:
        self._admin = admin

    def ids(self) -> list[str]:
        """Return the ids of those that are logged in."""
        return [found["id"] for found in self._admin.client_list() if found["user"] == USER]

    def num_logins(self) -> int:
        """Return how often anybody logged in since the server began."""
        found = self._admin.info("commandstats").get("cmdstat_auth", {"calls": 0})
        return int(found["calls"])


@pytest.fixture
def admin(redis: RedisServer) -> Iterator[Any]:
    """Return a client that may do anything."""
    with redis.client() as client:
        yield client
        client.execute_command("ACL", "DELUSER", USER)


@pytest.fixture
def tokens(admin: Any) -> Tokens:
    """Return passwords that change."""
    return Tokens(admin)


@pytest.fixture
def clock() -> Clock:
    """Return a clock that stands still."""
    return Clock()


@pytest.fixture
def store(redis: RedisServer, tokens: Tokens, clock: Clock) -> Iterator[ValkeyStore]:
    """Return a store that logs in with them."""
    store = ValkeyStore(valkey_config(redis.url), credentials=tokens, clock=clock)
    yield store
    store.close()


def test_connection_logs_in_once_while_its_login_is_young(
    store: ValkeyStore, tokens: Tokens, clock: Clock
) -> None:
    """A token need not be good any more for it to go on."""
    store.put("t", KEY, b"blob")
    clock.now_s += LOGIN_AGE_S - 1
    assert store.get("t", KEY) == b"blob"
    assert tokens.num_given == 1


def test_old_login_is_renewed_on_the_same_connection(
    store: ValkeyStore, tokens: Tokens, clock: Clock, admin: Any
) -> None:
    """Before the twelve hours are over after which ElastiCache ends it; then again."""
    connections = Connections(admin)
    store.put("t", KEY, b"blob")
    before, num_logins = connections.ids(), connections.num_logins()
    for number in (2, 3):
        clock.now_s += LOGIN_AGE_S + 1
        assert store.get("t", KEY) == b"blob"
        assert tokens.num_given == number
        assert connections.num_logins() == num_logins + number - 1
        assert connections.ids() == before
    assert LOGIN_AGE_S < 12 * 3_600


def test_refused_renewal_is_tried_with_a_new_connection(
    store: ValkeyStore, tokens: Tokens, clock: Clock, admin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is an error only if that is refused as well."""
    store.put("t", KEY, b"blob")
    clock.now_s += LOGIN_AGE_S + 1
    given = iter([(USER, "not this one"), tokens.get_credentials()])
    monkeypatch.setattr(tokens, "get_credentials", lambda: next(given))
    before = Connections(admin).ids()
    assert store.get("t", KEY) == b"blob"
    assert Connections(admin).ids() != before
    clock.now_s += LOGIN_AGE_S + 1
    monkeypatch.setattr(tokens, "get_credentials", lambda: (USER, "nor this one"))
    with pytest.raises(StoreError, match=r"^valkey: the user or the password is refused"):
        store.get("t", KEY)


def test_connection_that_could_not_log_in_is_not_used(
    store: ValkeyStore, tokens: Tokens, admin: Any
) -> None:
    """Once there are credentials again, it logs in, though its last login is not long ago."""
    store.put("t", KEY, b"blob")
    admin.execute_command("CLIENT", "KILL", "USER", USER)
    tokens.failure = StoreError("valkey", "there are no AWS credentials")
    with pytest.raises(StoreError, match="there are no AWS credentials"):
        store.get("t", KEY)
    tokens.failure = None
    assert store.get("t", KEY) == b"blob"
    assert tokens.num_given == 2
