"""Metrics of what the service does on AWS beside its requests."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter

REQUEST_LOG_OUTCOMES: Final = ("written", "dropped", "failed")
SECRET_OUTCOMES: Final = ("unchanged", "applied", "restart_needed", "failed")


class AwsMetrics:
    """Counters that may be written from any thread; their labels come from the sets above."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Create every counter at zero."""
        self._items = Counter(
            "snapkv_request_log_items",
            "Items of the request log: written, dropped (no room or no time), or refused.",
            ("outcome",),
            registry=registry,
        )
        self._refreshes = Counter(
            "snapkv_settings_refreshes",
            "Times the secret was read again, by what came of it.",
            ("outcome",),
            registry=registry,
        )
        for outcome in REQUEST_LOG_OUTCOMES:
            self._items.labels(outcome)
        for outcome in SECRET_OUTCOMES:
            self._refreshes.labels(outcome)

    def count_request_log_items(self, outcome: str, num_items: int) -> None:
        """Count items of the request log that had the same outcome."""
        self._items.labels(outcome).inc(num_items)

    def count_settings_refresh(self, outcome: str) -> None:
        """Count one time that the secret was read again."""
        self._refreshes.labels(outcome).inc()
