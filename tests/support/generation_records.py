"""Records of generations, for whatever takes them."""

from datetime import UTC, datetime
from typing import Any

from app.records import GenerationRecord
from snapkv_core import CompressionConfig, CompressionReport, FinishReason, RequestTimings

STARTED_AT = datetime(2026, 3, 1, 12, 30, 15, 250_000, tzinfo=UTC)

REPORT = CompressionReport(
    method="snapkv",
    original_entries=6_000,
    compressed_entries=512.0,
    original_bytes=138_240_000,
    compressed_bytes=11_796_480,
    kept_attention_mass=0.8125,
    skipped=None,
    compress_ms=3.5,
)


def record_of(request_id: str = "req_1", **values: Any) -> GenerationRecord:
    """Return the record of a compressed prompt and a whole answer, with other values."""
    fields: dict[str, Any] = {
        "request_id": request_id,
        "trace_id": None,
        "model": "demo",
        "started_at": STARTED_AT,
        "num_choices": 1,
        "num_prompt_tokens": 6_000,
        "num_output_tokens": 40,
        "finish_reason": FinishReason.STOP,
        "knobs": CompressionConfig("snapkv", 512, 16, 15, "max"),
        "compression": REPORT,
        "timings": RequestTimings(
            queue_ms=1.5,
            prefill_ms=900.25,
            decode_ms=800.0,
            time_to_first_token_ms=901.75,
            total_ms=1_701.75,
        ),
        "duration_ms": 1_701.75,
        "time_to_first_token_ms": 901.75,
    }
    return GenerationRecord(**{**fields, **values})
