"""Owns the metrics of the engine: filled as its observer, its gauges read when they are scraped."""

from collections.abc import Callable, Iterator
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from snapkv_core import (
    CompressionReport,
    EngineStats,
    FinishReason,
    RequestSummary,
    SnapshotUse,
    StepStats,
)

SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_STEP_SECONDS: Final = (0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
_BATCH_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024)
_RATIOS: Final = (1.0, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
_SHARES: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)

#: Dashboards made for other servers select their series by this label.
_THEIR_PREFIX: Final = "vllm:"
_THEIR_LABELS: Final = ("model_name",)

_NO_ENGINE: Final = EngineStats(
    num_waiting=0,
    num_running=0,
    kv_bytes=0,
    num_pages_used=0,
    num_pages_reserved=0,
    num_pages_total=0,
    page_bytes=0,
    workspace_bytes=0,
    device_memory_bytes=0,
    last_step_age_s=0.0,
    is_alive=False,
)


class EngineMetrics:
    """What the engine did, counted; and what it is doing, read at each scrape.

    The engine calls the `on_...` methods on its own thread.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        """Create every metric at zero."""
        self._gauges = _EngineGauges()
        registry.register(self._gauges)
        self._info = Gauge("snapkv_model_info", "The served model.", ("model",), registry=registry)
        self._model_name = ""
        self._create_request_metrics(registry)
        self._create_step_metrics(registry)
        self._create_compression_metrics(registry)

    def watch(self, stats: Callable[[], EngineStats], model: str) -> None:
        """Read the gauges from `stats`, once per scrape."""
        self._info.labels(model).set(1)
        self._model_name = model
        for family in (self._ttft, self._e2e, self._inter_token):
            family.labels(model)  # a series at zero, so that rates begin with the first request
        self._gauges.watch(stats, model)

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
            self._answers.labels(reason.value).inc()
        self._snapshot_uses.labels(summary.snapshot).inc()
        self._prompt_tokens.inc(summary.num_prompt_tokens)
        self._output_tokens.inc(summary.num_output_tokens)
        self._queue.observe(timings.queue_ms / 1_000)
        self._e2e.labels(self._model_name).observe(timings.total_ms / 1_000)
        if summary.num_output_tokens:
            self._prefill.observe(timings.prefill_ms / 1_000)
            self._ttft.labels(self._model_name).observe(timings.time_to_first_token_ms / 1_000)

    def on_step(self, step: StepStats) -> None:
        """Take what one step did.

        A step gives every running sequence one token, so its duration is the gap between two of
        their tokens, the prefill slices that ran in between included.
        """
        if step.num_decoded:
            self._inter_token.labels(self._model_name).observe(step.duration_s)
            self._decode_step.observe(step.decode_s)
            self._batch_size.observe(step.num_decoded)
        if step.num_prefill_tokens:
            self._prefill_step.observe(step.prefill_s)
        self._step_tokens.labels("decode").inc(step.num_decoded)
        self._step_tokens.labels("prefill").inc(step.num_prefill_tokens)

    def _create_request_metrics(self, registry: CollectorRegistry) -> None:
        self._answers = Counter(
            "snapkv_answers", "Answers by finish reason.", ("finish_reason",), registry=registry
        )
        for reason in FinishReason:
            self._answers.labels(reason.value)
        self._snapshot_uses = Counter(
            "snapkv_snapshot_requests",
            "Ended requests by what a snapshot did for them.",
            ("snapshot",),
            registry=registry,
        )
        for use in get_args(SnapshotUse):
            self._snapshot_uses.labels(use)
        self._prompt_tokens = Counter(
            "snapkv_prompt_tokens", "Prompt tokens of ended requests.", registry=registry
        )
        self._output_tokens = Counter(
            "snapkv_output_tokens", "Tokens generated by ended requests.", registry=registry
        )
        self._queue = Histogram(
            "snapkv_queue_seconds",
            "Submission until the first prefill slice.",
            buckets=SECONDS,
            registry=registry,
        )
        self._prefill = Histogram(
            "snapkv_prefill_seconds",
            "First prefill slice until the first token.",
            buckets=SECONDS,
            registry=registry,
        )
        self._ttft = Histogram(
            "vllm:time_to_first_token_seconds",
            "Submission until the first token.",
            _THEIR_LABELS,
            buckets=SECONDS,
            registry=registry,
        )
        self._e2e = Histogram(
            "vllm:e2e_request_latency_seconds",
            "Submission until the end.",
            _THEIR_LABELS,
            buckets=SECONDS,
            registry=registry,
        )

    def _create_step_metrics(self, registry: CollectorRegistry) -> None:
        self._step_tokens = Counter(
            "snapkv_step_tokens", "Tokens that steps processed.", ("phase",), registry=registry
        )
        for phase in ("prefill", "decode"):
            self._step_tokens.labels(phase)
        self._prefill_step = Histogram(
            "snapkv_prefill_step_seconds",
            "Prefill slices of one step.",
            buckets=_STEP_SECONDS,
            registry=registry,
        )
        self._decode_step = Histogram(
            "snapkv_decode_step_seconds",
            "Decode batch of one step, sampling included.",
            buckets=_STEP_SECONDS,
            registry=registry,
        )
        self._batch_size = Histogram(
            "snapkv_decode_batch_size",
            "Sequences in the decode batch of one step.",
            buckets=_BATCH_SIZES,
            registry=registry,
        )
        self._inter_token = Histogram(
            "vllm:inter_token_latency_seconds",
            "Time between two tokens of a sequence, one observation per step.",
            _THEIR_LABELS,
            buckets=_STEP_SECONDS,
            registry=registry,
        )

    def _create_compression_metrics(self, registry: CollectorRegistry) -> None:
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
        self._original_bytes = Counter(
            "snapkv_kv_original_bytes", "KV bytes of prompts before.", registry=registry
        )
        self._compressed_bytes = Counter(
            "snapkv_kv_compressed_bytes", "KV bytes of prompts after.", registry=registry
        )


class _EngineGauges(Collector):
    """Gauges that show one and the same moment, since each scrape asks the engine once."""

    def __init__(self) -> None:
        self._stats: Callable[[], EngineStats] = lambda: _NO_ENGINE
        self._model_name = ""

    def watch(self, stats: Callable[[], EngineStats], model: str) -> None:
        """Read from `stats` from now on."""
        self._stats, self._model_name = stats, model

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield every gauge."""
        stats = self._stats()
        used, total = stats.num_pages_used, stats.num_pages_total
        # Those of other servers are names that dashboards and gateways read already.
        for name, meaning, value in (
            ("snapkv_sequences_running", "Sequences read or generated.", stats.num_running),
            ("vllm:num_requests_running", "Sequences read or generated.", stats.num_running),
            ("snapkv_requests_waiting", "Requests that wait.", stats.num_waiting),
            ("vllm:num_requests_waiting", "Requests that wait.", stats.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of pages in use, 0 to 1.", used / max(1, total)),
            (
                "snapkv_prefill_workspace_bytes",
                "Bytes promised to prompts that are being read.",
                stats.workspace_bytes,
            ),
            (
                "snapkv_device_memory_bytes",
                "Bytes the process holds on the device; on a CPU its resident memory.",
                stats.device_memory_bytes,
            ),
            (
                "snapkv_engine_last_step_age_seconds",
                "Time that the running step has taken; 0 when idle.",
                stats.last_step_age_s,
            ),
            ("snapkv_engine_alive", "Whether the engine takes work.", float(stats.is_alive)),
        ):
            is_theirs = name.startswith(_THEIR_PREFIX)
            family = GaugeMetricFamily(name, meaning, labels=_THEIR_LABELS if is_theirs else ())
            family.add_metric((self._model_name,) if is_theirs else (), value)
            yield family
        yield _by_state(
            "snapkv_pages",
            "Pages of the KV cache.",
            {"used": used, "reserved": stats.num_pages_reserved, "total": total},
        )
        yield _by_state(
            "snapkv_kv_bytes",
            "Bytes of KV cache.",
            {
                "allocated": stats.kv_bytes,
                "reserved": stats.num_pages_reserved * stats.page_bytes,
                "total": total * stats.page_bytes,
            },
        )


def _by_state(name: str, meaning: str, values: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, meaning, labels=("state",))
    for state, value in values.items():
        family.add_metric((state,), value)
    return family
