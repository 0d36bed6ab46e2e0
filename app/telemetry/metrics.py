"""Owns the Prometheus metrics of one app instance, and fills them as the engine's observer."""

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from snapkv_core import CompressionReport, EngineStats, RequestSummary, StepStats

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4

_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_STEP_SECONDS: Final = (0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
_RATIOS: Final = (1.0, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
_SHARES: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)


class ServiceMetrics:
    """The metrics of one app, in a registry of their own so that tests can run many apps.

    Counters may be written from any thread. Labels take values from fixed sets only: routes of
    the app, outcomes of `count_request`, methods and reasons of the core.
    """

    def __init__(self) -> None:
        """Create every metric at zero."""
        self.registry = CollectorRegistry()
        self._create_request_metrics()
        self._create_compression_metrics()
        self._create_aliases()

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def count_request(self, route: str, outcome: str, duration_s: float) -> None:
        """Count one answered HTTP request.

        Args:
            route: Path template of the route, or `unmatched`.
            outcome: `success`, `invalid`, `rejected`, `aborted` or `error`.
            duration_s: Time until the last byte of the answer.
        """
        self._requests.labels(route, outcome).inc()
        self._request_seconds.labels(route).observe(duration_s)

    def watch_engine(self, stats: Callable[[], EngineStats], model: str) -> None:
        """Read the engine's gauges from `stats` whenever metrics are scraped."""
        self._info.labels(model).set(1)
        for gauge, read in (
            (self._running, lambda: stats().num_running),
            (self._waiting, lambda: stats().num_waiting),
            (self._vllm_running, lambda: stats().num_running),
            (self._vllm_waiting, lambda: stats().num_waiting),
            (self._kv_bytes.labels("allocated"), lambda: stats().kv_bytes),
            (self._step_age, lambda: stats().last_step_age_s),
            (self._alive, lambda: float(stats().is_alive)),
        ):
            gauge.set_function(read)

    def on_prompt_compressed(self, request_id: str, report: CompressionReport) -> None:
        """Take the report of a prompt that has just been read to its end."""
        self._prompts.labels(report.method, report.skipped or "none").inc()
        self._original_bytes.inc(report.original_bytes)
        self._compressed_bytes.inc(report.compressed_bytes)
        if report.skipped is None:
            self._ratio.observe(report.compression_ratio)
            self._kept_mass.observe(report.kept_attention_mass)

    def on_request_finished(self, summary: RequestSummary) -> None:
        """Take the summary of a request that ended, for whatever reason."""
        timings = summary.timings
        for reason in summary.finish_reasons:
            self._finished.labels(reason.value).inc()
        self._prompt_tokens.inc(summary.num_prompt_tokens)
        self._output_tokens.inc(summary.num_output_tokens)
        self._queue.observe(timings.queue_ms / 1_000)
        self._e2e.observe(timings.total_ms / 1_000)
        if summary.num_output_tokens:
            self._prefill.observe(timings.prefill_ms / 1_000)
            self._ttft.observe(timings.time_to_first_token_ms / 1_000)

    def on_step(self, step: StepStats) -> None:
        """Take what one step did.

        A step gives every running sequence one token, so its duration is the gap between two of
        their tokens, the prefill slice that ran in between included.
        """
        if step.num_decoded:
            self._inter_token.observe(step.duration_s)
        self._step_tokens.labels("decode").inc(step.num_decoded)
        self._step_tokens.labels("prefill").inc(step.num_prefill_tokens)

    def _create_request_metrics(self) -> None:
        registry = self.registry
        self._requests = Counter(
            "snapkv_requests", "HTTP requests.", ("route", "outcome"), registry=registry
        )
        self._request_seconds = Histogram(
            "snapkv_request_seconds",
            "Time until an HTTP request's last byte.",
            ("route",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._finished = Counter(
            "snapkv_answers", "Answers by finish reason.", ("finish_reason",), registry=registry
        )
        self._prompt_tokens = Counter(
            "snapkv_prompt_tokens", "Prompt tokens of ended requests.", registry=registry
        )
        self._output_tokens = Counter(
            "snapkv_output_tokens", "Tokens generated by ended requests.", registry=registry
        )
        self._step_tokens = Counter(
            "snapkv_step_tokens", "Tokens that steps processed.", ("phase",), registry=registry
        )
        self._queue = Histogram(
            "snapkv_queue_seconds",
            "Submission until the first prefill slice.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._prefill = Histogram(
            "snapkv_prefill_seconds",
            "First prefill slice until the first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._info = Gauge("snapkv_model_info", "The served model.", ("model",), registry=registry)
        self._alive = Gauge(
            "snapkv_engine_alive", "Whether the engine takes work.", registry=registry
        )
        self._step_age = Gauge(
            "snapkv_engine_last_step_age_seconds",
            "Time since the engine's loop last turned.",
            registry=registry,
        )
        self._running = Gauge(
            "snapkv_sequences_running", "Sequences read or generated.", registry=registry
        )
        self._waiting = Gauge("snapkv_requests_waiting", "Requests that wait.", registry=registry)

    def _create_compression_metrics(self) -> None:
        registry = self.registry
        self._ratio = Histogram(
            "snapkv_compression_ratio",
            "Original over kept entries of prompts that were compressed.",
            buckets=_RATIOS,
            registry=registry,
        )
        self._kept_mass = Histogram(
            "snapkv_kept_attention_mass",
            "Share of the window's attention to the prefix that kept tokens hold.",
            buckets=_SHARES,
            registry=registry,
        )
        self._prompts = Counter(
            "snapkv_prompts",
            "Prompts read, by method and by why nothing was dropped.",
            ("method", "skipped"),
            registry=registry,
        )
        self._kv_bytes = Gauge(
            "snapkv_kv_bytes", "Bytes of KV cache.", ("state",), registry=registry
        )
        self._original_bytes = Counter(
            "snapkv_kv_original_bytes", "KV bytes of prompts before.", registry=registry
        )
        self._compressed_bytes = Counter(
            "snapkv_kv_compressed_bytes", "KV bytes of prompts after.", registry=registry
        )

    def _create_aliases(self) -> None:
        """Create the names that dashboards and gateways of other servers already read."""
        registry = self.registry
        self._vllm_running = Gauge(
            "vllm:num_requests_running", "Sequences read or generated.", registry=registry
        )
        self._vllm_waiting = Gauge(
            "vllm:num_requests_waiting", "Requests that wait.", registry=registry
        )
        self._ttft = Histogram(
            "vllm:time_to_first_token_seconds",
            "Submission until the first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._inter_token = Histogram(
            "vllm:inter_token_latency_seconds",
            "Time between two tokens of a sequence, one observation per step.",
            buckets=_STEP_SECONDS,
            registry=registry,
        )
        self._e2e = Histogram(
            "vllm:e2e_request_latency_seconds",
            "Submission until the end.",
            buckets=_SECONDS,
            registry=registry,
        )
