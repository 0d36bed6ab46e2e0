"""A short prompt need not wait for a long one that is being read, and no answer changes by it."""

from typing import Any, Final

import pytest

from snapkv_core import CompressionConfig, Engine, GenerationRequest
from tests.support.engines import FULL, ids_of, make_engine, make_request
from tests.support.models import build_model, random_prompt

_SMALL = CompressionConfig(max_capacity_prompt=24, window_size=8, kernel_size=3)
_LONG: Final = random_prompt(1_700, seed=1)
_SHORT: Final = [random_prompt(30, seed=seed) for seed in (2, 3, 4)]


def new_engine(**settings: Any) -> Engine:
    """Build an engine that reads a long prompt in many steps, one cell of the grid in each."""
    model = build_model("llama", 2, seed=31)
    return make_engine(model, decode_gap_target_ms=1, prefill_chunk_tokens=256, **settings)


def new_requests(compression: CompressionConfig) -> list[GenerationRequest]:
    """Build a long request and three short ones."""
    return [
        make_request(prompt, compression, max_new_tokens=6, ignore_eos=True)
        for prompt in (_LONG, *_SHORT)
    ]


def run(engine: Engine, requests: list[GenerationRequest]) -> tuple[list[str], dict[str, Any]]:
    """Send the first request, the others once it is being read; returns who spoke first, and ids.

    Returns:
        The requests in the order of their first tokens, and the tokens of each.
    """
    engine.add_request(requests[0])
    for _ in range(3):
        assert engine.step() == [], "the long prompt must still be read"
    for request in requests[1:]:
        engine.add_request(request)
    events = []
    while engine.has_work:
        events += engine.step()
        engine.check_integrity()
    order = list(dict.fromkeys(event.request_id for event in events))
    ids = {
        request.request_id: ids_of([e for e in events if e.request_id == request.request_id])
        for request in requests
    }
    return order, ids


@pytest.mark.parametrize("compression", [FULL, _SMALL], ids=["full", "snapkv"])
def test_short_prompts_speak_first_and_every_answer_stays_the_same(
    compression: CompressionConfig,
) -> None:
    requests = new_requests(compression)
    engine = new_engine(overtake_max_tokens=100)
    alone = {request.request_id: engine.generate(request).token_ids[0] for request in requests}
    order, ids = run(engine, requests)
    names = [request.request_id for request in requests]
    assert order == [*names[1:], names[0]]
    assert ids == alone
    assert engine.kv_bytes == 0


@pytest.mark.parametrize("overtake_max_tokens", [0, 29])
def test_a_prompt_that_may_not_overtake_waits(overtake_max_tokens: int) -> None:
    requests = new_requests(_SMALL)
    order, _ = run(new_engine(overtake_max_tokens=overtake_max_tokens), requests)
    assert order == [request.request_id for request in requests]


def test_the_one_that_was_overtaken_goes_on_where_it_was() -> None:
    engine = new_engine(overtake_max_tokens=100)
    long, short, *_ = new_requests(_SMALL)
    engine.add_request(long)
    slices = []
    honest = engine.parts.runner.run_slice

    def run_slice(part: Any, sequences: Any) -> Any:
        slices.append(part)
        return honest(part, sequences)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine.parts.runner, "run_slice", run_slice)
        for _ in range(3):
            engine.step()
        engine.add_request(short)
        while engine.has_work:
            engine.step()
    long_id = slices[0].seq_id
    assert len({part.seq_id for part in slices}) == 2
    own = [part for part in slices if part.seq_id == long_id]
    at = (0, 0)
    for part in own:
        assert (part.layer_idx, part.token_start) == at
        is_end = part.token_end == len(_LONG)
        at = (part.layer_idx + 1, 0) if is_end else (part.layer_idx, part.token_end)
    assert at == (4, 0)
    places = [index for index, part in enumerate(slices) if part.seq_id != long_id]
    assert 0 < places[0] < places[-1] < len(slices) - 1, "in the middle of the long prompt"
