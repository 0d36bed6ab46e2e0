"""Prompts that were read before: looked up in a store before they are read, stored afterwards."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal, Protocol
from weakref import WeakValueDictionary

from snapkv_core.engine.fetch_speed import FetchSpeed
from snapkv_core.engine.finding import Finding
from snapkv_core.engine.observing import tell
from snapkv_core.engine.snapshot_writer import SnapshotWriter, WriteOutcome
from snapkv_core.errors import SnapshotError, StoreError
from snapkv_core.events import SnapshotStats, SnapshotUse
from snapkv_core.kv_cache.circuit_breaker import CircuitBreaker
from snapkv_core.kv_cache.guarded_store import StoreHeldBackError
from snapkv_core.kv_cache.snapshot import (
    PromptSnapshot,
    SnapshotBody,
    SnapshotIdentity,
)
from snapkv_core.kv_cache.snapshot_codec import decode_snapshot
from snapkv_core.kv_cache.store import KVStore
from snapkv_core.sequence import Sequence

#: Threads that fetch and decode. A store that hangs holds one until its client gives up.
_NUM_READERS: Final = 4
#: Length of the prompt that the published pace of reading is of.
_PACE_TOKENS: Final = 4_096

LookupOutcome = Literal["hit", "miss", "rejected", "timeout", "failed", "held_back"]

_logger = logging.getLogger(__name__)


class SnapshotObserver(Protocol):
    """Told of what the cache does, on any thread; must neither wait nor raise."""

    def on_lookup(self, outcome: LookupOutcome, seconds: float, num_bytes: int) -> None:
        """A store was asked; `held_back` means that it was not, since it fails."""

    def on_write(self, outcome: WriteOutcome, seconds: float, num_bytes: int) -> None:
        """A snapshot was stored or given up."""


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """When snapshots are used, and what they may cost.

    Attributes:
        body: How K and V are stored.
        min_prompt_tokens: Shorter prompts are read and neither looked up nor stored.
        max_snapshot_bytes: Prompts that keep more K and V are neither looked up nor stored.
        lookup_timeout_s: Longest that a request waits for a store.
        max_write_bytes_per_s: Pace of writing, on average over one snapshot and the pause after it.
        max_pending_bytes: Snapshots that wait for being written; more are dropped.
        max_held_bytes: Bytes of keys and values in this machine's memory, waiting for being
            written or for a request's turn, above which no prompt is looked up.
    """

    body: SnapshotBody = "exact"
    min_prompt_tokens: int = 256
    max_snapshot_bytes: int = 1024**3
    lookup_timeout_s: float = 2.0
    max_write_bytes_per_s: float = 200e6
    max_pending_bytes: int = 2 * 1024**3
    max_held_bytes: int = 4 * 1024**3


@dataclass(frozen=True, slots=True)
class SnapshotModel:
    """What the cache knows of the engine that it serves.

    Attributes:
        identity_of: Returns what a snapshot of a sequence's prompt must match.
        expected_bytes: Returns the bytes that a sequence's prompt will keep.
        expected_prefill_s: Returns the seconds that reading so many tokens should take.
    """

    identity_of: Callable[[Sequence], SnapshotIdentity]
    expected_bytes: Callable[[Sequence], int]
    expected_prefill_s: Callable[[int], float]


#: Tenant and key.
_Place = tuple[str, str]


class _Flight:
    """A prompt that one request looks up or reads, and others wait for.

    Made and landed on the event loop; the engine's thread asks whether anybody waits.

    Attributes:
        num_waiting: Requests that wait for it.
        will_store: Whether what comes of it is to be stored.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._landed: asyncio.Future[PromptSnapshot | None] | None = loop.create_future()
        self.num_waiting = 0
        self.will_store = False

    @property
    def is_wanted(self) -> bool:
        """Whether anybody has a use for the snapshot."""
        return self.will_store or self.num_waiting > 0

    async def wait(self) -> PromptSnapshot | None:
        """Return what comes of it; None when the prompt was not read to its end."""
        assert self._landed is not None, "flights that have landed are not found"
        self.num_waiting += 1
        try:
            return await asyncio.shield(self._landed)
        finally:
            self.num_waiting -= 1

    def land(self, snapshot: PromptSnapshot | None) -> None:
        """Give those who wait what came of it; once."""
        landed, self._landed = self._landed, None  # whoever holds the flight holds no snapshot
        assert landed is not None, "a flight lands once"
        landed.set_result(snapshot)


class SnapshotCache:
    """Spares equal prompts their prefill, in this process and through a store in others.

    Used on one event loop; stores, encoding and decoding run on threads of its own. Whatever goes
    wrong is a miss.

    Of equal prompts at once the first is looked up and read, and the others wait for what comes of
    it. A prompt is looked up and stored when fetching it should take less time than reading it.

    Attributes:
        speed: How fast the store has been.
        breaker: Holds lookups back while the store fails; writes have one of their own.
    """

    def __init__(
        self,
        store: KVStore,
        model: SnapshotModel,
        policy: SnapshotPolicy | None = None,
        observer: SnapshotObserver | None = None,
        breaker: CircuitBreaker | None = None,
    ) -> None:
        self.speed = FetchSpeed()
        self.breaker = breaker or CircuitBreaker()
        self._store = store
        self._model = model
        self._policy = policy or SnapshotPolicy()
        self._observer = observer
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="snapshot-reader")
        self._is_closed = False
        self._writer = SnapshotWriter(
            store,
            partial(tell, observer, "on_write"),
            body=self._policy.body,
            max_bytes_per_s=self._policy.max_write_bytes_per_s,
            max_pending_bytes=self._policy.max_pending_bytes,
        )
        self._flights: dict[_Place, _Flight] = {}
        # Snapshots that somebody still holds: a request that waits for its turn, or the writer.
        self._held: WeakValueDictionary[_Place, PromptSnapshot] = WeakValueDictionary()
        self._num_fetching_bytes = 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait for another one's prompt; on the event loop."""
        return sum(flight.num_waiting for flight in self._flights.values())

    @property
    def num_held_bytes(self) -> int:
        """Bytes of K and V of snapshots that are in memory, or about to be."""
        held = sum(snapshot.num_bytes for snapshot in self._held.values())
        return held + self._num_fetching_bytes

    def identify(self, leader: Sequence) -> SnapshotIdentity | None:
        """Return what a snapshot of a prompt must match; any thread may call.

        Args:
            leader: A request's first sequence, not queued yet.

        Returns:
            The identity; None when the prompt is too short, or keeps too much, to be looked up.
        """
        is_long = leader.num_prompt_tokens >= self._policy.min_prompt_tokens
        is_small = self._model.expected_bytes(leader) <= self._policy.max_snapshot_bytes
        return self._model.identity_of(leader) if is_long and is_small else None

    async def find(self, leader: Sequence, identity: SnapshotIdentity, namespace: str) -> Finding:
        """Look a prompt up, or wait for another request that reads the same one.

        It may wait for as long as the other request takes; the caller bounds that.

        Args:
            leader: The request's first sequence.
            identity: What `identify` has returned for it.
            namespace: The tenant; others' snapshots are never found.

        Returns:
            What was found, or who waits for what reading the prompt gives.
        """
        start_s = time.monotonic()
        finding = await self._find((namespace, identity.key()), identity, leader)
        return replace(finding, lookup_s=time.monotonic() - start_s)

    def stats(self) -> SnapshotStats:
        """Return what is known of the store's speed, and its state; any thread may call."""
        return SnapshotStats(
            round_trip_s=self.speed.round_trip_s or 0.0,
            fetch_bytes_per_s=self.speed.bytes_per_s or 0.0,
            prefill_tokens_per_s=_PACE_TOKENS / self._model.expected_prefill_s(_PACE_TOKENS),
            num_pending_bytes=self._writer.num_pending_bytes,
            is_held_back=self.breaker.is_open,
        )

    def close(self) -> None:
        """Give up what is not written yet and let go of the store; blocks for a bounded time."""
        self._is_closed = True
        self._readers.shutdown(wait=False)
        self._writer.close()
        self._store.close()

    async def _find(self, place: _Place, identity: SnapshotIdentity, leader: Sequence) -> Finding:
        while (flight := self._flights.get(place)) is not None:
            snapshot = await flight.wait()
            if snapshot is not None:
                return Finding("hit", snapshot)
        if (held := self._held.get(place)) is not None:
            return Finding("hit", held)
        loop = asyncio.get_running_loop()
        flight = self._flights[place] = _Flight(loop)
        # A store that is too slow is not asked; equal prompts wait for this one all the same.
        num_bytes = self._model.expected_bytes(leader)
        is_worthwhile = self._is_worthwhile(leader.num_prompt_tokens, num_bytes)
        if is_worthwhile:
            self._num_fetching_bytes += num_bytes
            try:
                snapshot = await self._look_up(place, identity)
            except BaseException:
                self._land(place, flight, None)
                raise
            finally:
                self._num_fetching_bytes -= num_bytes
            if snapshot is not None:
                self._land(place, flight, snapshot)
                return Finding("hit", snapshot)
        flight.will_store = is_worthwhile and not (
            self.breaker.is_open or self._writer.is_held_back
        )
        use: SnapshotUse = "stored" if flight.will_store else "miss" if is_worthwhile else "off"
        taken = partial(self._take, place, flight, identity)
        return Finding(
            use,
            on_snapshot=lambda snapshot: _post(loop, taken, snapshot),
            is_wanted=lambda: flight.is_wanted,
        )

    def _is_worthwhile(self, num_tokens: int, num_bytes: int) -> bool:
        if self.num_held_bytes + num_bytes > self._policy.max_held_bytes:
            return False
        return self.speed.expected_s(num_bytes) < self._model.expected_prefill_s(num_tokens)

    async def _look_up(self, place: _Place, identity: SnapshotIdentity) -> PromptSnapshot | None:
        if not self.breaker.allows_call():
            tell(self._observer, "on_lookup", "held_back", 0.0, 0)
            return None
        start_s = time.monotonic()
        outcome: LookupOutcome = "failed"
        snapshot, num_bytes = None, 0
        try:
            async with asyncio.timeout(self._policy.lookup_timeout_s):
                found = await asyncio.get_running_loop().run_in_executor(
                    self._readers, self._fetch, place, identity
                )
            snapshot, num_bytes = found if found is not None else (None, 0)
            outcome = "miss" if snapshot is None else "hit"
        except TimeoutError:
            outcome = "timeout"
        except SnapshotError as error:
            outcome = "rejected"
            _logger.warning("a stored snapshot was rejected: %s", error)
        except StoreHeldBackError:
            outcome = "held_back"  # by a breaker of its own
        except StoreError as error:
            _logger.warning("looking a snapshot up failed: %s", error)
        except Exception:
            _logger.exception("looking a snapshot up failed")
        seconds = time.monotonic() - start_s
        self._learn(outcome, seconds, snapshot)
        tell(self._observer, "on_lookup", outcome, seconds, num_bytes)
        return snapshot

    def _fetch(
        self, place: _Place, identity: SnapshotIdentity
    ) -> tuple[PromptSnapshot, int] | None:
        # Lookups that waited for a thread while the engine was stopped.
        blob = None if self._is_closed else self._store.get(*place)
        if blob is None:
            return None
        return decode_snapshot(blob, identity, body=self._policy.body), len(blob)

    def _learn(
        self, outcome: LookupOutcome, seconds: float, snapshot: PromptSnapshot | None
    ) -> None:
        if outcome in ("timeout", "failed"):
            self.breaker.note_failure()
            return
        self.breaker.note_success()
        if snapshot is not None:
            # In bytes of K and V, whatever they are stored in: so are those that are expected.
            self.speed.observe_hit(snapshot.num_bytes, seconds)
        elif outcome == "miss":
            self.speed.observe_miss(seconds)

    def _take(
        self,
        place: _Place,
        flight: _Flight,
        identity: SnapshotIdentity,
        snapshot: PromptSnapshot | None,
    ) -> None:
        """Give a prompt that was read to those that wait for it, and store it."""
        if self._flights.get(place) is not flight:
            return
        self._land(place, flight, snapshot)
        if snapshot is not None and flight.will_store:
            self._writer.write(place[0], identity, snapshot)

    def _land(self, place: _Place, flight: _Flight, snapshot: PromptSnapshot | None) -> None:
        del self._flights[place]
        if snapshot is not None:
            self._held[place] = snapshot
        flight.land(snapshot)


def _post(
    loop: asyncio.AbstractEventLoop,
    taken: Callable[[PromptSnapshot | None], None],
    snapshot: PromptSnapshot | None,
) -> None:
    """Pass a snapshot from the engine's thread to the event loop."""
    try:
        loop.call_soon_threadsafe(taken, snapshot)
    except RuntimeError:
        _logger.debug("the event loop was closed; nobody waits for the snapshot any more")
