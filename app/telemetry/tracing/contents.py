"""What of a generation goes into its trace, whatever the trace's format. Never any text of it."""

from dataclasses import dataclass

from app.records import GenerationRecord


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of a request, in seconds since 1970.

    Attributes:
        name: `queue`, `snapshot`, `prefill`, `compress` or `decode`.
        started_s: Its start.
        ended_s: Its end.
        parts: Stretches within it.
    """

    name: str
    started_s: float
    ended_s: float
    parts: tuple["Phase", ...] = ()


def annotations_of(record: GenerationRecord) -> dict[str, str | int]:
    """Return what traces are searched by."""
    return {
        "model": record.model,
        "input_tokens": record.num_prompt_tokens,
        "method": record.knobs.method,
        "finish_reason": record.finish_reason.value,
        "snapshot": record.snapshot,
    }


def kv_cache_of(record: GenerationRecord) -> dict[str, float] | None:
    """Return what compression did; None when the prompt was never read to its end."""
    report = record.compression
    if report is None:
        return None
    return {
        "original_entries": report.original_entries,
        "compressed_entries": report.compressed_entries,
        "compression_ratio": report.compression_ratio,
    }


def phases_of(record: GenerationRecord) -> tuple[Phase, ...]:
    """Lay the measured times of a request that has ended one behind the other.

    Returns:
        The phases it went through, in order; none of a request that was not measured.
    """
    timings = record.timings
    if timings is None:
        return ()
    queued_s = record.started_at.timestamp()
    prefill_s = queued_s + timings.queue_ms / 1_000
    decode_s = prefill_s + timings.prefill_ms / 1_000
    phases = (
        Phase("queue", queued_s, prefill_s, _lookup(record, queued_s, prefill_s)),
        Phase("prefill", prefill_s, decode_s, _compress(record, prefill_s, decode_s)),
        Phase("decode", decode_s, decode_s + timings.decode_ms / 1_000),
    )
    # A phase that was never reached took no time.
    return tuple(phase for phase in phases if phase.ended_s > phase.started_s)


def _lookup(record: GenerationRecord, started_s: float, ended_s: float) -> tuple[Phase, ...]:
    if record.lookup_ms <= 0:
        return ()
    # Before it the prompt was made tokens, which takes milliseconds that nobody measured.
    return (Phase("snapshot", started_s, min(ended_s, started_s + record.lookup_ms / 1_000)),)


def _compress(record: GenerationRecord, started_s: float, ended_s: float) -> tuple[Phase, ...]:
    report = record.compression
    if report is None or report.compress_ms <= 0:
        return ()
    # Compression takes a bit of every layer's turn; its sum stands at the end of the prefill.
    return (Phase("compress", max(started_s, ended_s - report.compress_ms / 1_000), ended_s),)
