"""A request that is aborted or fails gives back its memory at once and leaves the others alone."""

import pytest
import torch

from snapkv_core import (
    CompressionConfig,
    Engine,
    FinishReason,
    GenerationFailedError,
    TokenEvent,
)
from tests.support.engines import (
    ask,
    drain,
    ids_of,
    make_engine,
    make_request,
    summary_of,
    text_of,
)
from tests.support.models import build_model, random_prompt

_COMPRESSION = CompressionConfig(max_capacity_prompt=24, window_size=8, kernel_size=3)
_PROMPT = random_prompt(100, seed=1)
_POISON = 259


def poisoned_engine() -> Engine:
    """Build an engine whose model answers token 259 in a prompt with nothing but NaN."""
    model = build_model("llama", 2, seed=5)
    with torch.no_grad():
        model.model.embed_tokens.weight[_POISON] = torch.nan
    return make_engine(model, prefill_chunk_tokens=32)


@pytest.mark.parametrize("num_steps", [0, 1, 5, 16, 20])
def test_abort_frees_the_kv_at_any_moment_and_the_neighbour_goes_on(num_steps: int) -> None:
    engine = make_engine(build_model("llama", 2, seed=5), prefill_chunk_tokens=32)
    alone = ask(engine, _PROMPT, _COMPRESSION, max_new_tokens=30, ignore_eos=True)
    doomed = make_request(random_prompt(90, seed=2), _COMPRESSION, max_new_tokens=50, n=2)
    neighbour = make_request(_PROMPT, _COMPRESSION, max_new_tokens=30, ignore_eos=True)
    engine.add_request(doomed)
    engine.add_request(neighbour)
    events: list[TokenEvent] = []
    for _ in range(num_steps):
        events += engine.step()

    held = engine.kv_bytes
    ended = engine.abort(doomed.request_id)
    assert engine.kv_bytes < held or held == 0
    assert [event.finish_reason for event in ended] == [FinishReason.ABORT] * 2
    assert summary_of(ended).finish_reasons == (FinishReason.ABORT,) * 2
    assert engine.abort(doomed.request_id) == []

    later = drain(engine)
    assert {event.request_id for event in later} == {neighbour.request_id}
    own = [event for event in events + later if event.request_id == neighbour.request_id]
    assert ids_of(own) == alone.token_ids[0]
    assert engine.kv_bytes == 0


def test_aborting_the_only_request_leaves_an_idle_engine() -> None:
    engine = make_engine(build_model("mistral", 1, seed=5), prefill_chunk_tokens=16)
    request = make_request(_PROMPT, _COMPRESSION, max_new_tokens=50)
    engine.add_request(request)
    for _ in range(3):
        engine.step()
    engine.abort(request.request_id)
    assert not engine.has_work
    assert engine.kv_bytes == 0
    assert engine.abort("never seen") == []


@pytest.mark.parametrize("n", [1, 3])
def test_a_broken_sequence_fails_alone(n: int) -> None:
    engine = poisoned_engine()
    alone = ask(engine, _PROMPT, _COMPRESSION, max_new_tokens=20, ignore_eos=True)
    sound = make_request(_PROMPT, _COMPRESSION, max_new_tokens=20, ignore_eos=True)
    broken = make_request([1, 2, _POISON], _COMPRESSION, max_new_tokens=20, n=n)
    for request in (sound, broken):
        engine.add_request(request)
    events = drain(engine)

    failed = [event for event in events if event.request_id == broken.request_id]
    assert [event.finish_reason for event in failed] == [FinishReason.ERROR] * n
    assert all(event.error for event in failed)
    assert summary_of(failed).finish_reasons == (FinishReason.ERROR,) * n
    own = [event for event in events if event.request_id == sound.request_id]
    assert ids_of(own) == alone.token_ids[0]
    assert text_of(own) == alone.texts[0]
    assert engine.kv_bytes == 0


def test_generate_raises_what_went_wrong_and_the_next_request_works() -> None:
    engine = poisoned_engine()
    with pytest.raises(GenerationFailedError, match="logit"):
        ask(engine, [1, 2, _POISON], _COMPRESSION, max_new_tokens=20)
    assert engine.kv_bytes == 0
    assert ask(engine, _PROMPT, _COMPRESSION, max_new_tokens=3).summary.num_output_tokens > 0


def test_score_leaves_nothing_behind() -> None:
    engine = make_engine(build_model("llama", 2, seed=5))
    engine.score(_PROMPT, (1, 2, 3), _COMPRESSION)
    assert engine.kv_bytes == 0
    assert not engine.has_work
