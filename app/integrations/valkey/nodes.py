"""The servers behind one address: a single one, or the primaries of a cluster.

The library's own cluster client is not used: it connects as it is made, tries again by itself, and
changes its map of the cluster while other threads read it.
"""

import bisect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from valkey import BlockingConnectionPool, Valkey, exceptions
from valkey.crc import key_slot

from app.integrations.valkey.config import ValkeyConfig
from app.integrations.valkey.connection import (
    BoundedConnection,
    BoundedTlsConnection,
    ConnectionLimits,
    Credentials,
)

_Result = TypeVar("_Result")
#: A command as it is sent: its name and its arguments.
Command = Sequence[str | bytes | memoryview | int]
Address = tuple[str, int]

#: How a node of a cluster says that a key is not, or not yet, its own.
_REDIRECTS: Final = ("MOVED ", "ASK ", "TRYAGAIN", "CLUSTERDOWN")


def exchange(client: Any, commands: Sequence[Command]) -> list[Any]:
    """Send commands at once and return their answers.

    Raises:
        ResponseError: The first that a command was answered with; all were sent.
        ConnectionError: The connection broke, or there was none.
        TimeoutError: The node or the call's time was too slow.
    """
    pipeline = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    # The library would put the command, and with it the value, into the error's text.
    answers: list[Any] = pipeline.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


class Nodes(Protocol):
    """Runs work on the node it belongs to; any thread may call."""

    def run(self, key: str, work: Callable[[Any], _Result]) -> _Result:
        """Call `work` with the client of the node that holds `key`; it may be called twice."""
        ...

    def primaries(self) -> list[Any]:
        """Return the clients of all nodes that take writes."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


def open_nodes(
    config: ValkeyConfig, limits: ConnectionLimits, credentials: Credentials | None
) -> Nodes:
    """Return the nodes of a configuration; connects to nothing."""

    def create_client(address: Address) -> Any:
        return Valkey(connection_pool=_pool(config, address, limits, credentials))

    address = (config.host, config.port)
    if config.is_cluster:
        return ClusterNodes(address, create_client, limits)
    return SingleNode(create_client(address))


def _pool(
    config: ValkeyConfig,
    address: Address,
    limits: ConnectionLimits,
    credentials: Credentials | None,
) -> Any:
    options: dict[str, Any] = {
        "limits": limits,
        "host": address[0],
        "port": address[1],
        "db": config.db,
        "socket_timeout": config.idle_timeout_s,
        "socket_keepalive": True,
    }
    if credentials is not None:
        options["credential_provider"] = credentials
    else:
        options |= {"username": config.username, "password": config.password}
    if config.has_tls:
        # The library's default takes a valid certificate of any other host.
        options["ssl_check_hostname"] = True
        if config.ca_file is not None:
            options["ssl_ca_certs"] = str(config.ca_file)
    return BlockingConnectionPool(
        connection_class=BoundedTlsConnection if config.has_tls else BoundedConnection,
        max_connections=config.max_connections,
        timeout=config.connect_timeout_s,
        **options,
    )


class SingleNode:
    """One server, or what stands for several and looks like one."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def run(self, key: str, work: Callable[[Any], _Result]) -> _Result:
        """See `Nodes.run`."""
        del key  # all of them are here
        return work(self._client)

    def primaries(self) -> list[Any]:
        """See `Nodes.primaries`."""
        return [self._client]

    def close(self) -> None:
        """See `Nodes.close`."""
        self._client.connection_pool.disconnect()


@dataclass(frozen=True, slots=True)
class _Map:
    """Which node holds which slots.

    Attributes:
        last_slots: Last slot of each range, ascending.
        ranges: First slot of each range, and its primary.
    """

    last_slots: list[int]
    ranges: list[tuple[int, Address]]

    def primary_of(self, slot: int) -> Address | None:
        index = bisect.bisect_left(self.last_slots, slot)
        if index == len(self.ranges) or self.ranges[index][0] > slot:
            return None
        return self.ranges[index][1]


class ClusterNodes:
    """The primaries of a cluster, asked for at the first call and again when they have changed.

    A `_Map` is replaced and never changed, so it is read without a lock; `_lock` is held while one
    is asked for and guards `_clients`.
    """

    def __init__(
        self, seed: Address, create_client: Callable[[Address], Any], limits: ConnectionLimits
    ) -> None:
        """Know one node.

        Args:
            seed: Any node; a name that stands for all of them is best.
            create_client: Makes a client that has not connected yet.
            limits: Says when a call's time is up.
        """
        self._seed = seed
        self._create_client = create_client
        self._limits = limits
        self._lock = threading.Lock()
        self._clients: dict[Address, Any] = {}
        self._map: _Map | None = None

    def run(self, key: str, work: Callable[[Any], _Result]) -> _Result:
        """See `Nodes.run`; asks once more where the key lies when its node says it moved."""
        try:
            return work(self._client_of(key))
        except exceptions.ResponseError as error:
            if not str(error).startswith(_REDIRECTS):
                raise
            self._map = None
        except (exceptions.ConnectionError, exceptions.TimeoutError):
            # A replica may have taken over; the next call asks.
            self._map = None
            raise
        return work(self._client_of(key))

    def primaries(self) -> list[Any]:
        """See `Nodes.primaries`; asks the cluster, since none may be left out."""
        self._map = None
        addresses = {address for _, address in self._current_map().ranges}
        return [self._client_at(address) for address in sorted(addresses)]

    def close(self) -> None:
        """See `Nodes.close`."""
        with self._lock:
            clients, self._clients = self._clients, {}
        for client in clients.values():
            client.connection_pool.disconnect()

    def _client_of(self, key: str) -> Any:
        address = self._current_map().primary_of(key_slot(key.encode()))
        if address is None:
            self._map = None
            raise exceptions.ConnectionError("no node holds the key's slot")
        return self._client_at(address)

    def _client_at(self, address: Address) -> Any:
        with self._locked():
            return self._known_client(address)

    def _known_client(self, address: Address) -> Any:
        if address not in self._clients:
            self._clients[address] = self._create_client(address)
        return self._clients[address]

    def _current_map(self) -> _Map:
        found = self._map
        if found is not None:
            return found
        with self._locked():
            # While this thread waited, another one may have asked.
            found = self._map
            if found is None:
                found = self._map = self._ask()
            return found

    def _ask(self) -> _Map:
        failure: Exception | None = None
        for address in [self._seed, *(known for known in self._clients if known != self._seed)]:
            try:
                (slots,) = exchange(self._known_client(address), [("CLUSTER SLOTS",)])
            except (exceptions.ConnectionError, exceptions.TimeoutError) as error:
                failure = error
            else:
                return _read_map(slots, address[0])
        raise failure or exceptions.ConnectionError("no node answers")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=min(self._limits.deadline.left_s(), 3_600.0)):
            raise exceptions.TimeoutError("another call is still looking for the cluster's nodes")
        try:
            yield
        finally:
            self._lock.release()


def _read_map(slots: list[Any], asked_host: str) -> _Map:
    ranges = sorted(
        # A node that does not know its own name means the one it was asked by.
        (last, first, ((primary[0] or b"").decode() or asked_host, primary[1]))
        for first, last, primary, *_replicas in slots
    )
    return _Map(
        last_slots=[last for last, _, _ in ranges],
        ranges=[(first, address) for _, first, address in ranges],
    )
