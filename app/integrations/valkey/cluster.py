"""The primaries of a cluster, and which of them holds a key.

The library's own cluster client is not used: it connects as it is made, tries again by itself, and
changes its map of the cluster while other threads read it.
"""

import bisect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from valkey import exceptions
from valkey.crc import key_slot

from app.integrations.valkey.connection import CallDeadline
from app.integrations.valkey.exchange import exchange

_Result = TypeVar("_Result")
Address = tuple[str, int]

#: How a node of a cluster says that a key is not, or not yet, its own.
_REDIRECTS: Final = ("MOVED ", "ASK ", "TRYAGAIN", "CLUSTERDOWN")


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
        self, seed: Address, create_client: Callable[[Address], Any], deadline: CallDeadline
    ) -> None:
        """Know one node.

        Args:
            seed: Any node; a name that stands for all of them is best.
            create_client: Makes a client that has not connected yet.
            deadline: Says when a call's time is up.
        """
        self._seed = seed
        self._create_client = create_client
        self._deadline = deadline
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
        if not self._lock.acquire(timeout=min(self._deadline.left_s(), 3_600.0)):
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
