"""The item of the request log: what it holds, and that table and items have one schema."""

import dataclasses
import json
import math
from datetime import timedelta, timezone
from decimal import Decimal

import pytest
from boto3.dynamodb.types import TypeSerializer

from app.integrations.aws.request_item import REQUEST_LOG_TABLE, item_of
from snapkv_core import FinishReason, KeptTokenCounts
from tests.support.generation_records import REPORT, STARTED_AT, record_of
from tests.support.markdown import ROOT

DAY_S = 86_400


def test_item_holds_what_is_known_of_a_generation() -> None:
    """Every attribute by hand: names and units are read by others."""
    assert item_of(record_of("req_7", trace_id="1-abc"), ttl_days=30) == {
        "request_id": "req_7",
        "started_at": "2026-03-01T12:30:15.250000Z",
        "expires_at": 1_772_368_215 + 30 * DAY_S,
        "trace_id": "1-abc",
        "model": "demo",
        "status": "stop",
        "num_choices": 1,
        "day": "2026-03-01",
        "input_tokens": 6_000,
        "output_tokens": 40,
        "method": "snapkv",
        "max_capacity_prompt": 512,
        "window_size": 16,
        "kernel_size": 15,
        "pooling": "max",
        "snapshot": "off",
        "original_entries": 6_000,
        "compressed_entries": Decimal("512.0"),
        "compression_ratio": Decimal("11.71875"),
        "original_bytes": 138_240_000,
        "compressed_bytes": 11_796_480,
        "kept_attention_mass": Decimal("0.8125"),
        "queue_ms": Decimal("1.5"),
        "prefill_ms": Decimal("900.25"),
        "decode_ms": Decimal("800.0"),
        "time_to_first_token_ms": Decimal("901.75"),
        "duration_ms": Decimal("1701.75"),
    }


def test_what_is_not_known_has_no_attribute() -> None:
    """A request that was aborted while it waited has no report, no timings and no first token."""
    record = record_of(
        finish_reason=FinishReason.ABORT,
        compression=None,
        timings=None,
        time_to_first_token_ms=None,
    )
    item = item_of(record, ttl_days=1)
    assert item["status"] == "abort"
    assert None not in item.values()
    assert {"compression_ratio", "queue_ms", "time_to_first_token_ms", "trace_id"}.isdisjoint(item)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_dynamodb_refuses_are_left_out(value: float) -> None:
    """One of them would cost the other items of its batch."""
    report = dataclasses.replace(REPORT, kept_attention_mass=value)
    item = item_of(record_of(compression=report), ttl_days=1)
    assert "kept_attention_mass" not in item
    assert item["original_entries"] == 6_000


def test_times_sort_whatever_zone_they_came_in() -> None:
    """Started at is UTC with six digits, so that text order is time order."""
    elsewhere = STARTED_AT.astimezone(timezone(timedelta(hours=9))).replace(microsecond=0)
    item = item_of(record_of(started_at=elsewhere), ttl_days=1)
    assert item["started_at"] == "2026-03-01T12:30:15.000000Z"
    assert item["day"] == "2026-03-01"
    assert item["expires_at"] == 1_772_368_215 + DAY_S


def test_details_of_explain_stay_out() -> None:
    """They are as long as the prompt."""
    counts = KeptTokenCounts(per_layer=(b"\x01",), num_kv_heads=1, total=(1,))
    report = dataclasses.replace(REPORT, kept_counts=counts, skipped="method_full")
    item = item_of(record_of(compression=report), ttl_days=1)
    assert item.keys() - item_of(record_of(), ttl_days=1).keys() == {"compression_skipped"}


def test_items_have_the_types_of_the_schema() -> None:
    """The file that creates the table describes what is written into it."""
    report = dataclasses.replace(REPORT, skipped="method_full")
    item = item_of(record_of(trace_id="1-abc", compression=report), ttl_days=30)
    serialize = TypeSerializer().serialize
    types = {name: next(iter(serialize(value))) for name, value in item.items()}
    assert types == REQUEST_LOG_TABLE.attributes


def test_schema_is_plain_json_that_terraform_can_read() -> None:
    """`jsondecode(file(...))` finds keys whose types it can declare."""
    file = ROOT / "app" / "integrations" / "aws" / "request_log_table.json"
    schema = json.loads(file.read_text(encoding="utf-8"))
    assert schema["attributes"][schema["hash_key"]] == "S"
    assert schema["attributes"][schema["range_key"]] == "S"
    assert schema["attributes"][schema["ttl_attribute"]] == "N"
    assert schema["billing_mode"] == "PAY_PER_REQUEST"
