"""Logs each generation that ended: a line for it, for what compression did, and for snapshots."""

import structlog

from app.records import GenerationRecord
from app.telemetry.logging import INFERENCE_COMPLETE, KV_CACHE_COMPRESSED, SNAPSHOT_LOOKED_UP

_log = structlog.get_logger("snapkv.requests")


class GenerationLog:
    """The record sink that writes log lines."""

    def on_generation(self, record: GenerationRecord) -> None:
        """See `RecordSink.on_generation`."""
        report = record.compression
        if report is not None and report.skipped is None:
            _log.info(
                KV_CACHE_COMPRESSED,
                request_id=record.request_id,
                method=report.method,
                kv_original_size=report.original_entries,
                kv_compressed_size=report.compressed_entries,
                kv_original_bytes=report.original_bytes,
                kv_compressed_bytes=report.compressed_bytes,
                compression_ratio=report.compression_ratio,
                kept_attention_mass=report.kept_attention_mass,
            )
        if record.snapshot != "off":
            _log.info(
                SNAPSHOT_LOOKED_UP,
                request_id=record.request_id,
                snapshot=record.snapshot,
                lookup_ms=record.lookup_ms,
            )
        _log.info(
            INFERENCE_COMPLETE,
            request_id=record.request_id,
            model=record.model,
            input_tokens=record.num_prompt_tokens,
            output_tokens=record.num_output_tokens,
            duration_ms=record.duration_ms,
            time_to_first_token_ms=record.time_to_first_token_ms,
            queue_ms=None if record.timings is None else record.timings.queue_ms,
            finish_reason=record.finish_reason.value,
        )
