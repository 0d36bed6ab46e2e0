"""What a request is answered does not depend on who else is served, in any bit of its logits."""

import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from snapkv_core import CompressionConfig, Engine, EngineConfig, GenerationRequest
from tests.support.engines import FULL, drain, ids_of, make_engine, make_request
from tests.support.essays import cache_dir, load_essays
from tests.support.models import build_model, random_prompt
from tests.support.recording import Answer, differing_answers, record_logits

pytestmark = pytest.mark.slow

_NUM_SEQS = 64
#: By answer: its token ids and the logits they were chosen from.
Answers = dict[Answer, tuple[tuple[int, ...], list[Tensor]]]


@cache
def tiny_model(dtype: torch.dtype) -> Any:
    """Build the model once: its layers stay packed, so every engine multiplies alike."""
    model: Any = build_model("mistral", 2, seed=61)
    return model.to(dtype)


def crowd() -> list[GenerationRequest]:
    """Draw requests for 64 sequences that differ in everything a request can say."""
    chance = random.Random(6)
    requests: list[GenerationRequest] = []
    num_seqs = 0
    while num_seqs < _NUM_SEQS:
        n = 3 if num_seqs in (10, 40) else 1
        length = chance.choice([1, 5, 30, 31, 64, 100, 200, 257])
        if num_seqs in (4, 20, 33, 50):
            length = chance.randint(1_200, 1_500)
        window_size = chance.choice([4, 8, 16, 32])
        compression = CompressionConfig(
            max_capacity_prompt=window_size + chance.choice([1, 20, 63, 150, 400]),
            window_size=window_size,
            kernel_size=chance.choice([1, 5, 7]),
            pooling=chance.choice(["avg", "max"]),
        )
        sampling: dict[str, Any] = chance.choice(
            [{}, {"temperature": 0.8}, {"temperature": 1.5, "top_p": 0.9, "top_k": 40}]
        )
        # One prompt starts a step, so early answers must be long for all to be there at once.
        longest = 80 - num_seqs
        requests.append(
            make_request(
                random_prompt(length, seed=len(requests)),
                chance.choice([FULL, compression, compression, compression]),
                max_new_tokens=chance.choice([longest, longest, longest, longest // 4]),
                seed=chance.randrange(1_000),
                n=n,
                ignore_eos=True,
                **sampling,
            )
        )
        num_seqs += n
    return requests


def answer(engine: Engine, requests: list[GenerationRequest]) -> tuple[Answers, int]:
    """Run requests at once; returns their answers and the largest batch there was."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        logits = record_logits(engine, monkeypatch)
        for request in requests:
            engine.add_request(request)
        largest = 0
        events = []
        while engine.has_work:
            events += engine.step()
            largest = max(largest, engine.num_running)
    assert engine.kv_bytes == 0
    answers = {}
    for (request_id, choice), rows in logits.items():
        own = [event for event in events if event.request_id == request_id]
        answers[request_id, choice] = (ids_of(own, choice), rows)
    return answers, largest


@cache
def alone(dtype: torch.dtype) -> tuple[list[GenerationRequest], Answers]:
    """Run each request by itself, on an engine that has never seen another."""
    requests = crowd()
    answers: Answers = {}
    for request in requests:
        engine = make_engine(tiny_model(dtype), prefill_chunk_tokens=4_096)
        answers |= answer(engine, [request])[0]
    return requests, answers


def require_same(found: Answers, expected: Answers) -> None:
    """Compare ids first, which says more, then every bit of the logits."""
    assert {who: ids for who, (ids, _) in found.items()} == {
        who: ids for who, (ids, _) in expected.items()
    }
    rows = [{who: rows for who, (_, rows) in each.items()} for each in (found, expected)]
    assert differing_answers(*rows) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("page_size", "prefill_chunk_tokens"),
    [(1, 512), (16, 256), (64, 1_024), (64, 256)],
)
def test_64_sequences_at_once_answer_as_each_does_alone(
    dtype: torch.dtype, page_size: int, prefill_chunk_tokens: int
) -> None:
    requests, expected = alone(dtype)
    engine = make_engine(
        tiny_model(dtype),
        max_num_seqs=_NUM_SEQS,
        page_size=page_size,
        prefill_chunk_tokens=prefill_chunk_tokens,
    )
    assert engine.dtype is dtype
    found, largest = answer(engine, requests)
    assert len(found) == _NUM_SEQS
    assert largest > 40, "the crowd must be there at once"
    require_same(found, expected)


def test_the_order_of_arrival_changes_nothing() -> None:
    requests, expected = alone(torch.float32)
    shuffled = requests.copy()
    random.Random(1).shuffle(shuffled)
    # Slices as short as the pacer may make them, and few places, so that many wait.
    engine = make_engine(
        tiny_model(torch.float32), max_num_seqs=7, page_size=16, decode_gap_target_ms=1
    )
    require_same(answer(engine, shuffled)[0], expected)


@pytest.mark.demo
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_model_answers_a_crowd_as_each_alone(dtype: Any) -> None:
    config = EngineConfig(
        model="demo",
        cache_dir=str(cache_dir()),
        device="cpu",
        dtype=dtype,
        num_threads=2,
        # A prompt a step, however slow the machine is: so they run at the same time.
        decode_gap_target_ms=600_000,
    )
    engine = Engine.load(config)
    ids = engine.tokenizer.encode(load_essays()[:20_000])
    requests = [
        make_request(
            ids[100 * index : 100 * index + length],
            CompressionConfig(max_capacity_prompt=capacity, window_size=16, kernel_size=7),
            max_new_tokens=10 - index,
            temperature=0.7 * (index % 2),
            seed=index,
            ignore_eos=True,
        )
        for index, (length, capacity) in enumerate(
            [(120, 64), (40, 64), (300, 128), (1, 64), (90, 33), (257, 400), (17, 64), (64, 20)]
        )
    ]
    expected: Answers = {}
    for request in requests:
        expected |= answer(engine, [request])[0]
    found, largest = answer(engine, requests)
    assert largest == len(requests)
    require_same(found, expected)
    assert not drain(engine)
