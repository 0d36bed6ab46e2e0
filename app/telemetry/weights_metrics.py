"""Owns the metrics of fetching the model's weights; knows no store."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class WeightsMetrics:
    """What fetching the weights took; all zero for weights that were on this machine."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Create every metric at zero."""
        self._bytes = Counter(
            "snapkv_weights_bytes",
            "Bytes of the model's weights that came over the network.",
            registry=registry,
        )
        self._seconds = Gauge(
            "snapkv_weights_download_seconds",
            "Time that fetching the model's weights has taken.",
            registry=registry,
        )
        self._num_counted = 0

    def on_progress(self, received_bytes: int, elapsed_s: float) -> None:
        """Take the state of a download; called by one thread.

        The numbers of one download only grow; smaller ones are those of the next.
        """
        if received_bytes < self._num_counted:
            self._num_counted = 0
        self._bytes.inc(received_bytes - self._num_counted)
        self._num_counted = received_bytes
        self._seconds.set(elapsed_s)
