"""What of a generation goes into a trace, and where its measured times are put."""

from dataclasses import replace
from datetime import UTC, datetime

from app.records import GenerationRecord
from app.telemetry.tracing.contents import Phase, annotations_of, kv_cache_of, phases_of
from snapkv_core import CompressionConfig, CompressionReport, FinishReason, RequestTimings

START_S = 1_700_000_000.0
REPORT = CompressionReport(
    method="snapkv",
    original_entries=1_024,
    compressed_entries=512.0,
    original_bytes=65_536,
    compressed_bytes=32_768,
    kept_attention_mass=0.9,
    skipped=None,
    compress_ms=5.0,
)
RECORD = GenerationRecord(
    request_id="r-1",
    trace_id=None,
    model="fake",
    started_at=datetime.fromtimestamp(START_S, UTC),
    num_choices=1,
    num_prompt_tokens=1_024,
    num_output_tokens=3,
    finish_reason=FinishReason.LENGTH,
    knobs=CompressionConfig(),
    compression=REPORT,
    timings=RequestTimings(
        queue_ms=10.0,
        prefill_ms=20.0,
        decode_ms=30.0,
        time_to_first_token_ms=30.0,
        total_ms=60.0,
    ),
    duration_ms=60.0,
    time_to_first_token_ms=30.0,
)


def spans_of(record: GenerationRecord) -> dict[str, list[float]]:
    """Return start and end of each phase and part, in milliseconds after the start."""
    phases = phases_of(record)
    flat: list[Phase] = [inner for phase in phases for inner in (phase, *phase.parts)]
    return {
        phase.name: [
            round((moment_s - START_S) * 1e3, 2) for moment_s in (phase.started_s, phase.ended_s)
        ]
        for phase in flat
    }


def test_phases_follow_each_other_and_compression_ends_the_prefill() -> None:
    assert spans_of(RECORD) == {
        "queue": [0, 10],
        "prefill": [10, 30],
        "compress": [25, 30],
        "decode": [30, 60],
    }


def test_compression_does_not_begin_before_the_prefill() -> None:
    """Rounding, or a clock of another kind, must not put a part outside its whole."""
    record = replace(RECORD, compression=replace(REPORT, compress_ms=21.0))
    assert spans_of(record)["compress"] == [10, 30]


def test_phases_never_reached_are_left_out() -> None:
    """A request whose time was up while it waited was neither read nor generated."""
    timings = RequestTimings(
        queue_ms=40.0, prefill_ms=0.0, decode_ms=0.0, time_to_first_token_ms=40.0, total_ms=40.0
    )
    record = replace(RECORD, timings=timings, compression=None)
    assert spans_of(record) == {"queue": [0, 40]}


def test_request_without_times_has_annotations_alone() -> None:
    record = replace(RECORD, timings=None, compression=None, finish_reason=FinishReason.ABORT)
    assert phases_of(record) == ()
    assert kv_cache_of(record) is None
    assert annotations_of(record) == {
        "model": "fake",
        "input_tokens": 1_024,
        "method": "snapkv",
        "finish_reason": "abort",
        "snapshot": "off",
    }


def test_looking_a_prompt_up_is_a_part_of_the_queue() -> None:
    record = replace(RECORD, snapshot="hit", lookup_ms=4.0)
    assert spans_of(record)["snapshot"] == [0, 4]
    assert annotations_of(record)["snapshot"] == "hit"
    # Other clocks measured the queue: a part is never longer than the whole.
    assert spans_of(replace(record, lookup_ms=11.0))["snapshot"] == [0, 10]


def test_metadata_tells_what_compression_did() -> None:
    assert kv_cache_of(RECORD) == {
        "original_entries": 1_024,
        "compressed_entries": 512.0,
        "compression_ratio": 2.0,
    }
