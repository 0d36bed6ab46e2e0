"""What the fake engine says and reports: the prompt's words again, with made-up figures."""

from collections.abc import Sequence

from snapkv_core import (
    ChatMessage,
    CompressionReport,
    FinishReason,
    GenerationRequest,
    KeptTokenCounts,
    PositionLogprobs,
    RequestSummary,
    RequestTimings,
    SnapshotUse,
    TokenEvent,
    TokenLogprob,
)

NUM_LAYERS = 2
NUM_KV_HEADS = 2
BYTES_PER_ENTRY = 64


def words_of(prompt: str | Sequence[int] | Sequence[ChatMessage]) -> list[str]:
    """Split a prompt into the fake's tokens."""
    if isinstance(prompt, str):
        return prompt.split() or [prompt]
    return [
        word
        for item in prompt
        for word in ((item.content or "").split() if isinstance(item, ChatMessage) else [str(item)])
    ] or ["?"]


def report_of(request: GenerationRequest, num_tokens: int) -> CompressionReport:
    """Return what compressing a prompt of this length reports."""
    compression = request.compression
    is_smaller = compression.compresses(num_tokens)
    kept = compression.max_capacity_prompt if is_smaller else num_tokens
    reason = "method_full" if compression.method == "full" else "prompt_fits_capacity"
    return CompressionReport(
        method=compression.method,
        original_entries=num_tokens,
        compressed_entries=float(kept),
        original_bytes=num_tokens * BYTES_PER_ENTRY,
        compressed_bytes=kept * BYTES_PER_ENTRY,
        kept_attention_mass=0.9 if is_smaller else 1.0,
        skipped=None if is_smaller else reason,  # type: ignore[arg-type]  # one of the literals
        compress_ms=0.5,
        kept_counts=_kept_counts(num_tokens, is_smaller) if request.explain else None,
    )


def _kept_counts(num_tokens: int, is_smaller: bool) -> KeptTokenCounts:
    # Where some are dropped, each token is kept by another number of heads in each layer.
    layers = [
        bytes(
            (index + layer) % (NUM_KV_HEADS + 1) if is_smaller else NUM_KV_HEADS
            for index in range(num_tokens)
        )
        for layer in range(NUM_LAYERS)
    ]
    return KeptTokenCounts(
        per_layer=tuple(layers),
        num_kv_heads=NUM_KV_HEADS,
        total=tuple(map(sum, zip(*layers, strict=True))),
    )


def summary_of(
    request: GenerationRequest,
    num_prompt_tokens: int,
    reasons: tuple[FinishReason, ...],
    num_output_tokens: int,
    report: CompressionReport | None,
    snapshot: SnapshotUse,
) -> RequestSummary:
    """Return a summary with fixed timings."""
    return RequestSummary(
        request_id=request.request_id,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        finish_reasons=reasons,
        compression=report,
        timings=RequestTimings(
            queue_ms=1.0,
            prefill_ms=20.0,
            decode_ms=30.0,
            time_to_first_token_ms=21.0,
            total_ms=51.0,
        ),
        snapshot=snapshot,
    )


def events_of(
    request: GenerationRequest,
    words: Sequence[str],
    max_new_tokens: int,
    report: CompressionReport,
    snapshot: SnapshotUse,
) -> list[TokenEvent]:
    """Return all events of an answer: each choice repeats the prompt, numbered when n > 1."""
    num_choices = request.sampling.n
    num_words = min(max_new_tokens, len(words))
    reason = FinishReason.LENGTH if num_words == max_new_tokens else FinishReason.STOP
    summary = summary_of(
        request,
        len(words),
        (reason,) * num_choices,
        num_words * num_choices,
        report,
        snapshot,
    )
    events = []
    for position in range(num_words):
        for choice in range(num_choices):
            mark = f"{choice}:" if num_choices > 1 else ""
            text = f" {mark}{words[position]}"
            is_last = position == num_words - 1
            is_end = is_last and choice == num_choices - 1
            is_echoed = request.echo and position == 0
            events.append(
                TokenEvent(
                    request.request_id,
                    choice,
                    f"{request.prompt}{text}" if is_echoed else text,
                    token_ids=(position,),
                    finish_reason=reason if is_last else None,
                    summary=summary if is_end else None,
                    logprobs=logprobs_of(request, text),
                    prompt_logprobs=prompt_logprobs_of(request, words) if is_echoed else (),
                )
            )
    return events


def logprobs_of(request: GenerationRequest, token: str) -> tuple[PositionLogprobs, ...]:
    """Return a token's log-probability, -0.5, and those of as many others as were asked for."""
    num_top = request.sampling.logprobs
    if num_top is None:
        return ()
    chosen = TokenLogprob(0, token.encode(), -0.5)
    others = (TokenLogprob(rank, b"top%d" % rank, -1.0 - rank) for rank in range(1, num_top))
    return (PositionLogprobs(chosen, (chosen, *others)[:num_top]),)


def prompt_logprobs_of(
    request: GenerationRequest, words: Sequence[str]
) -> tuple[PositionLogprobs, ...]:
    """Return the same for the words of a prompt, the first of which has none."""
    if request.sampling.logprobs is None:
        return ()
    first = PositionLogprobs(TokenLogprob(0, words[0].encode(), None), ())
    return (first, *(logprobs_of(request, f" {word}")[0] for word in words[1:]))
