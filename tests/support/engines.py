"""Engines around tiny models, and short ways to ask them."""

import itertools
from collections.abc import Sequence
from typing import Any

from snapkv_core import (
    CompressionConfig,
    Engine,
    EngineConfig,
    GenerationRequest,
    RequestOutput,
    RequestSummary,
    SamplingParams,
    TokenEvent,
)
from tests.support.models import ByteTokenizer

#: Keeps everything by method, whatever the prompt's length.
FULL = CompressionConfig(method="full")

_names = itertools.count()


def make_engine(model: Any, tokenizer: Any = None, **settings: Any) -> Engine:
    """Build an engine on the CPU, in the model's number format.

    The tokenizer defaults to one token per byte.
    """
    config = EngineConfig(model="tiny", device="cpu", dtype="float32", **settings)
    return Engine.from_transformers(model, tokenizer or ByteTokenizer(), config)


def make_request(
    prompt: Any, compression: CompressionConfig = FULL, *, explain: bool = False, **sampling: Any
) -> GenerationRequest:
    """Build a request with a name of its own."""
    if isinstance(prompt, list):
        prompt = tuple(prompt)
    return GenerationRequest(
        f"request-{next(_names)}", prompt, SamplingParams(**sampling), compression, explain
    )


def ask(
    engine: Engine,
    prompt: Any,
    compression: CompressionConfig = FULL,
    *,
    explain: bool = False,
    **sampling: Any,
) -> RequestOutput:
    """Run one request alone and check that it leaves nothing behind."""
    output = engine.generate(make_request(prompt, compression, explain=explain, **sampling))
    engine.check_integrity()
    assert engine.kv_bytes == 0
    assert not engine.has_work
    return output


def drain(engine: Engine) -> list[TokenEvent]:
    """Step until nothing is left to do, checking the KV store after every step."""
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step()
        engine.check_integrity()
    return events


def run_together(engine: Engine, requests: Sequence[GenerationRequest]) -> list[list[TokenEvent]]:
    """Queue all requests, run them at once, and sort their events by request."""
    for request in requests:
        engine.add_request(request)
    events = drain(engine)
    return [[event for event in events if event.request_id == r.request_id] for r in requests]


def ids_of(events: Sequence[TokenEvent], choice_index: int = 0) -> tuple[int, ...]:
    """Join the token ids of one choice."""
    pieces = [event.token_ids for event in events if event.choice_index == choice_index]
    return tuple(itertools.chain.from_iterable(pieces))


def text_of(events: Sequence[TokenEvent], choice_index: int = 0) -> str:
    """Join the text of one choice."""
    return "".join(event.text for event in events if event.choice_index == choice_index)


def summary_of(events: Sequence[TokenEvent]) -> RequestSummary:
    """Return the summary on a request's last event, which is the only one that has it."""
    assert [event.summary is not None for event in events] == [False] * (len(events) - 1) + [True]
    summary = events[-1].summary
    assert summary is not None
    return summary
