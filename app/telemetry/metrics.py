"""Owns the Prometheus registry of one app instance, and the metrics of its HTTP requests."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from app.telemetry.aws_metrics import AwsMetrics
from app.telemetry.engine_metrics import SECONDS, EngineMetrics
from app.telemetry.snapshot_metrics import SnapshotMetrics
from app.telemetry.weights_metrics import WeightsMetrics

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4

#: Codes of errors, and a client that left; a code that is not among them counts as `other`.
ERROR_REASONS: Final = (
    "bad_request",
    "body_timeout",
    "body_too_large",
    "client_left",
    "deadline_exceeded",
    "draining",
    "engine_failed",
    "engine_loading",
    "engine_stopped",
    "generation_failed",
    "internal_error",
    "invalid_body",
    "invalid_value",
    "method_not_allowed",
    "model_not_found",
    "not_found",
    "over_ceiling",
    "prompt_too_long",
    "queue_full",
    "rate_limited",
    "request_too_large",
    "unauthorized",
    "unsupported_media_type",
)
OTHER_REASON: Final = "other"


class ServiceMetrics:
    """The metrics of one app, in a registry of their own so that tests can run many apps.

    Counters may be written from any thread. Labels take values from fixed sets only: routes of
    the app, outcomes of `count_request`, codes of errors, methods and reasons of the core.

    Attributes:
        registry: Everything that `render` shows.
        engine: The part that the engine fills.
        weights: The part that a download of the weights fills.
        snapshots: The part that the cache of snapshots fills.
        aws: What is counted on AWS.
    """

    def __init__(self, price_per_hour: float | None = None) -> None:
        """Create every metric at zero; that of the price only where there is one."""
        self.registry = CollectorRegistry()
        self.engine = EngineMetrics(self.registry)
        self.weights = WeightsMetrics(self.registry)
        self.snapshots = SnapshotMetrics(self.registry)
        self.aws = AwsMetrics(self.registry)
        self._requests = Counter(
            "snapkv_requests", "HTTP requests.", ("route", "outcome"), registry=self.registry
        )
        self._request_seconds = Histogram(
            "snapkv_request_seconds",
            "Time until an HTTP request's last byte.",
            ("route",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self._errors = Counter(
            "snapkv_request_errors",
            "HTTP requests that got an error instead of a whole answer, by its code.",
            ("reason",),
            registry=self.registry,
        )
        for reason in (*ERROR_REASONS, OTHER_REASON):
            self._errors.labels(reason)
        self._lost_traces = Counter(
            "snapkv_traces_lost",
            "Segments or spans of traces that never reached their collector.",
            registry=self.registry,
        )
        if price_per_hour is not None:
            Gauge(
                "snapkv_price_per_hour",
                "What the machine costs per hour, in the currency of the setting.",
                registry=self.registry,
            ).set(price_per_hour)

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def count_lost_traces(self, num: int) -> None:
        """Count segments or spans that never reached their collector."""
        self._lost_traces.inc(num)

    def count_request(
        self, route: str, outcome: str, error_code: str | None, duration_s: float
    ) -> None:
        """Count one answered HTTP request.

        Args:
            route: Path template of the route, or `unmatched`.
            outcome: `success`, `invalid`, `rejected`, `deadline`, `aborted` or `error`.
            error_code: Code of the error it got, or `client_left`; None when it got none.
            duration_s: Time until the last byte of the answer.
        """
        self._requests.labels(route, outcome).inc()
        self._request_seconds.labels(route).observe(duration_s)
        if error_code is not None:
            is_known = error_code in ERROR_REASONS
            self._errors.labels(error_code if is_known else OTHER_REASON).inc()
