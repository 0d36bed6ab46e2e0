"""Owns the shape of an item of the request log; the table's own shape is in a file beside it.

That file is read here and by Terraform, so that table and items cannot differ.
"""

import json
import math
from dataclasses import dataclass
from datetime import UTC
from decimal import Decimal
from importlib.resources import files
from typing import Final

from app.records import GenerationRecord

_SECONDS_PER_DAY: Final = 24 * 3_600

#: Attributes by name, not yet in DynamoDB's notation.
Item = dict[str, str | int | Decimal]


@dataclass(frozen=True, slots=True)
class TableIndex:
    """A global secondary index.

    Attributes:
        name: Its name.
        hash_key: Attribute it is by.
        range_key: Attribute it is sorted by.
        projected: Attributes it holds beside the keys.
    """

    name: str
    hash_key: str
    range_key: str
    projected: list[str]


@dataclass(frozen=True, slots=True)
class TableSchema:
    """The request log's table, in the words of Terraform's `aws_dynamodb_table`.

    Attributes:
        billing_mode: How capacity is paid for.
        hash_key: Attribute whose value callers may choose and use again.
        range_key: Attribute that tells apart the requests of one such value.
        index: Requests by the day on which they came, for the cost report.
        ttl_attribute: Attribute with the second, since 1970, after which an item is deleted.
        attributes: DynamoDB's type of every attribute; keys are text.
    """

    billing_mode: str
    hash_key: str
    range_key: str
    ttl_attribute: str
    index: TableIndex
    attributes: dict[str, str]


def _read_schema() -> TableSchema:
    file = files("app.integrations.aws") / "request_log_table.json"
    schema = json.loads(file.read_text(encoding="utf-8"))
    return TableSchema(**schema | {"index": TableIndex(**schema["index"])})


REQUEST_LOG_TABLE: Final = _read_schema()


def item_of(record: GenerationRecord, ttl_days: int) -> Item:
    """Return the item for a generation; what is not known of it has no attribute.

    Args:
        record: What is known.
        ttl_days: Days after its start until the item expires.
    """
    started_at = record.started_at.astimezone(UTC)
    values: dict[str, str | int | float | None] = {
        REQUEST_LOG_TABLE.hash_key: record.request_id,
        REQUEST_LOG_TABLE.range_key: started_at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        REQUEST_LOG_TABLE.index.hash_key: started_at.date().isoformat(),
        REQUEST_LOG_TABLE.ttl_attribute: int(started_at.timestamp()) + ttl_days * _SECONDS_PER_DAY,
        "trace_id": record.trace_id,
        "model": record.model,
        "status": record.finish_reason.value,
        "num_choices": record.num_choices,
        "input_tokens": record.num_prompt_tokens,
        "output_tokens": record.num_output_tokens,
        "method": record.knobs.method,
        "max_capacity_prompt": record.knobs.max_capacity_prompt,
        "window_size": record.knobs.window_size,
        "kernel_size": record.knobs.kernel_size,
        "pooling": record.knobs.pooling,
        "snapshot": record.snapshot,
        "duration_ms": record.duration_ms,
        "time_to_first_token_ms": record.time_to_first_token_ms,
    }
    if (report := record.compression) is not None:
        values |= {
            "compression_skipped": report.skipped,
            "original_entries": report.original_entries,
            "compressed_entries": report.compressed_entries,
            "compression_ratio": report.compression_ratio,
            "original_bytes": report.original_bytes,
            "compressed_bytes": report.compressed_bytes,
            "kept_attention_mass": report.kept_attention_mass,
        }
    if (timings := record.timings) is not None:
        values |= {
            "queue_ms": timings.queue_ms,
            "prefill_ms": timings.prefill_ms,
            "decode_ms": timings.decode_ms,
        }
    return {
        name: Decimal(repr(value)) if isinstance(value, float) else value
        for name, value in values.items()
        # DynamoDB refuses a whole batch for one number that is not finite.
        if value is not None and not (isinstance(value, float) and not math.isfinite(value))
    }
