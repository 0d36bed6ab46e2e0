"""Owns the metrics of snapshots of prompts: lookups, writes, and how fast their store is."""

from collections.abc import Callable, Iterator
from typing import Final, get_args

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from snapkv_core import (
    LookupOutcome,
    SnapshotStats,
    StoreError,
    StoreHeldBackError,
    WriteOutcome,
)

#: Stores over a network; those in memory do not fail.
_STORES: Final = ("valkey", "s3")
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_UNKNOWN: Final = SnapshotStats(
    round_trip_s=0.0,
    fetch_bytes_per_s=0.0,
    prefill_tokens_per_s=0.0,
    num_pending_bytes=0,
    is_held_back=False,
)

_log = structlog.get_logger("snapkv.snapshots")


class SnapshotMetrics:
    """What the cache of snapshots does, counted, and its state, read at each scrape.

    It is the cache's observer; any thread may call it.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        """Create every metric at zero."""
        self._gauges = _SnapshotGauges()
        registry.register(self._gauges)
        self._lookups = Counter(
            "snapkv_snapshot_lookups", "Lookups by outcome.", ("outcome",), registry=registry
        )
        self._writes = Counter(
            "snapkv_snapshot_writes",
            "Snapshots that were to be stored, by what became of them.",
            ("outcome",),
            registry=registry,
        )
        self._bytes = Counter(
            "snapkv_snapshot_bytes",
            "Bytes of snapshots that came from the store, and that it took.",
            ("direction",),
            registry=registry,
        )
        self._lookup_seconds = Histogram(
            "snapkv_snapshot_lookup_seconds",
            "Lookups that were made, decoding included.",
            ("outcome",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._write_seconds = Histogram(
            "snapkv_snapshot_write_seconds",
            "Writes that were made, encoding included.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._store_errors = Counter(
            "snapkv_snapshot_store_errors",
            "Calls that a store failed.",
            ("store",),
            registry=registry,
        )
        self._create_series()

    def watch(self, stats: Callable[[], SnapshotStats | None]) -> None:
        """Read the gauges from `stats`, once per scrape."""
        self._gauges.stats = stats

    def on_lookup(self, outcome: LookupOutcome, seconds: float, num_bytes: int) -> None:
        """See `SnapshotObserver.on_lookup`."""
        self._lookups.labels(outcome).inc()
        if outcome != "held_back":
            self._lookup_seconds.labels("hit" if outcome == "hit" else "no_hit").observe(seconds)
        self._bytes.labels("fetched").inc(num_bytes)

    def on_write(self, outcome: WriteOutcome, seconds: float, num_bytes: int) -> None:
        """See `SnapshotObserver.on_write`."""
        self._writes.labels(outcome).inc()
        if outcome != "dropped":
            self._write_seconds.observe(seconds)
        if outcome == "stored":
            self._bytes.labels("stored").inc(num_bytes)

    def on_store_error(self, store: str, error: StoreError) -> None:
        """Count and log that a store failed a call; that it was not asked is neither."""
        if isinstance(error, StoreHeldBackError):
            return
        self._store_errors.labels(store).inc()
        _log.warning("snapshot_store_failed", store=store, reason=error.reason)

    def _create_series(self) -> None:
        for lookup in get_args(LookupOutcome):
            self._lookups.labels(lookup)
        for write in get_args(WriteOutcome):
            self._writes.labels(write)
        for direction in ("fetched", "stored"):
            self._bytes.labels(direction)
        for found in ("hit", "no_hit"):
            self._lookup_seconds.labels(found)
        for store in _STORES:
            self._store_errors.labels(store)


class _SnapshotGauges(Collector):
    """Reads the cache's numbers when it is scraped."""

    def __init__(self) -> None:
        self.stats: Callable[[], SnapshotStats | None] = lambda: None

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield every gauge; zeros without a cache."""
        stats = self.stats() or _UNKNOWN
        for name, meaning, value in (
            (
                "snapkv_snapshot_round_trip_seconds",
                "Time until the store says that it holds nothing; 0 before the first.",
                stats.round_trip_s,
            ),
            (
                "snapkv_snapshot_fetch_bytes_per_second",
                "Pace at which snapshots come and are decoded; 0 before the first.",
                stats.fetch_bytes_per_s,
            ),
            (
                "snapkv_prefill_tokens_per_second",
                "Pace at which a prompt of 4,096 tokens should be read; 0 without a store.",
                stats.prefill_tokens_per_s,
            ),
            (
                "snapkv_snapshot_pending_bytes",
                "Bytes of keys and values that wait for being stored.",
                stats.num_pending_bytes,
            ),
            (
                "snapkv_snapshot_held_back",
                "Whether the store is left alone since it fails.",
                float(stats.is_held_back),
            ),
        ):
            yield GaugeMetricFamily(name, meaning, value=value)
