"""Writes metrics as log lines in CloudWatch's embedded metric format (EMF).

CloudWatch makes metrics of them as they arrive, so alarms and autoscaling need no metric filter.
Lines go through the process's logging like any other; docs/adr/0012 says why.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from app.records import GenerationRecord
from app.telemetry.logging import ENGINE_METRICS, GENERATION_METRICS, METRICS_LOGGER
from snapkv_core import EngineStats, FinishReason

NAMESPACE: Final = "SnapKV"
DIMENSIONS: Final = ("Service", "Model")
#: CloudWatch's own resolution; more lines would cost more and show no more.
INTERVAL_S: Final = 60.0
#: CloudWatch takes no longer value of a dimension.
MAX_DIMENSION_CHARS: Final = 1_024

#: Every metric by name, with its unit in CloudWatch's words.
UNITS: Final[Mapping[str, str]] = {
    "Latency": "Milliseconds",
    "QueueTime": "Milliseconds",
    "TimeToFirstToken": "Milliseconds",
    "InputTokens": "Count",
    "OutputTokens": "Count",
    "Errors": "Count",
    "CompressionRatio": "None",
    "KeptAttentionMass": "None",
    "SnapshotHits": "Count",
    "SequencesRunning": "Count",
    "RequestsWaiting": "Count",
    "Load": "Count",
    "PagesUsed": "Count",
    "PagesReservedPercent": "Percent",
    "EngineAlive": "Count",
}

_FAILURES: Final = (FinishReason.ERROR, FinishReason.DEADLINE)

_log = structlog.get_logger(METRICS_LOGGER)


class EmfMetrics:
    """Writes a line for each generation that ended, and one a minute for the engine.

    Used on the event loop.
    """

    def __init__(self, service: str, interval_s: float = INTERVAL_S) -> None:
        """Name the service; `interval_s` is the time between two lines of the engine."""
        self._service = service
        self._interval_s = interval_s
        self._reporting: asyncio.Task[None] | None = None

    def on_generation(self, record: GenerationRecord) -> None:
        """See `RecordSink.on_generation`."""
        values: dict[str, float | None] = {
            "Latency": record.duration_ms,
            "QueueTime": None if record.timings is None else record.timings.queue_ms,
            "TimeToFirstToken": record.time_to_first_token_ms,
            "InputTokens": record.num_prompt_tokens,
            "OutputTokens": record.num_output_tokens,
            "Errors": int(record.finish_reason in _FAILURES),
        }
        report = record.compression
        if report is not None and report.skipped is None:
            values["CompressionRatio"] = report.compression_ratio
            values["KeptAttentionMass"] = report.kept_attention_mass
        if record.snapshot != "off":  # their mean is the share of hits
            values["SnapshotHits"] = int(record.snapshot == "hit")
        self._write(GENERATION_METRICS, record.model, values, request_id=record.request_id)

    def watch(self, stats: Callable[[], EngineStats], model: str) -> None:
        """Write what `stats` returns, now and then at each interval until `stop`."""
        self._reporting = asyncio.get_running_loop().create_task(
            self._report(stats, model), name="emf-engine-metrics"
        )

    async def stop(self) -> None:
        """Write no more lines of the engine; harmless when none were written."""
        if self._reporting is not None:
            self._reporting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reporting

    async def _report(self, stats: Callable[[], EngineStats], model: str) -> None:
        while True:
            try:
                self._write(ENGINE_METRICS, model, _engine_values(stats()))
            except Exception:  # the next line may succeed, and autoscaling lives on it
                _log.exception("engine_metrics_failed")
            await asyncio.sleep(self._interval_s)

    def _write(
        self, event: str, model: str, values: Mapping[str, float | None], **properties: str
    ) -> None:
        # JSON has no name for what is not finite, and a missing value takes part in no statistic.
        known = {
            name: value
            for name, value in values.items()
            if value is not None and math.isfinite(value)
        }
        dimensions = (_dimension(self._service), _dimension(model))
        directive = {
            "Namespace": NAMESPACE,
            "Dimensions": [list(DIMENSIONS)],
            "Metrics": [{"Name": name, "Unit": UNITS[name]} for name in known],
        }
        _log.info(
            event,
            _aws={"Timestamp": round(time.time() * 1_000), "CloudWatchMetrics": [directive]},
            **dict(zip(DIMENSIONS, dimensions, strict=True)),
            **known,
            **properties,
        )


def _engine_values(stats: EngineStats) -> dict[str, float | None]:
    total = stats.num_pages_total
    return {
        "SequencesRunning": stats.num_running,
        "RequestsWaiting": stats.num_waiting,
        "Load": stats.num_running + stats.num_waiting,
        "PagesUsed": stats.num_pages_used,
        "PagesReservedPercent": 100 * stats.num_pages_reserved / total if total else None,
        "EngineAlive": int(stats.is_alive),
    }


def _dimension(value: str) -> str:
    # CloudWatch drops a metric whose dimension is blank, too long or not ASCII.
    ascii_only = value.encode("ascii", "replace").decode("ascii").strip()
    return ascii_only[:MAX_DIMENSION_CHARS] or "unknown"
