"""Penalties, biases and log-probabilities are those of the formula and of transformers' model."""

from functools import cache
from typing import Any

import pytest
import torch

from snapkv_core import Engine, InvalidParameterError, PositionLogprobs, SamplingParams
from tests.oracles.penalised_greedy import penalised_greedy
from tests.support.engines import ask, ids_of, make_engine, make_request, run_together
from tests.support.models import EOS_ID, VOCAB_SIZE, build_model, random_prompt

_PROMPT = random_prompt(40, seed=3)
_LONG: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}


@cache
def shared_engine() -> Engine:
    """Build one engine for the whole file."""
    return make_engine(build_model("llama", 2, seed=31), max_num_seqs=16)


@torch.no_grad()
def reference_logprobs(tokens: tuple[int, ...]) -> torch.Tensor:
    """Return the log-probabilities `[num_tokens - 1, vocab_size]` of what follows each token."""
    logits = build_model("llama", 2, seed=31).double()(torch.tensor([tokens])).logits[0, :-1]
    found: torch.Tensor = logits.log_softmax(-1)
    return found


def check_position(found: PositionLogprobs, expected: torch.Tensor, num_top: int) -> None:
    """Compare one position with the log-probabilities of the whole vocabulary."""
    assert found.chosen.logprob == pytest.approx(float(expected[found.chosen.token_id]), abs=1e-3)
    ranked = expected.sort(descending=True)
    assert [token.token_id for token in found.top] == ranked.indices[:num_top].tolist()
    logprobs = [token.logprob for token in found.top]
    assert logprobs == pytest.approx(ranked.values[:num_top].tolist(), abs=1e-3)


@pytest.mark.parametrize(
    ("presence", "frequency"), [(1.5, 0.0), (0.0, 0.7), (-1.0, 0.0), (0.0, -2.0), (2.0, 2.0)]
)
def test_penalties_are_those_of_the_formula(presence: float, frequency: float) -> None:
    expected = penalised_greedy(
        build_model("llama", 2, seed=31), _PROMPT, 24, presence=presence, frequency=frequency
    )
    output = ask(
        shared_engine(), _PROMPT, presence_penalty=presence, frequency_penalty=frequency, **_LONG
    )
    assert list(output.token_ids[0]) == expected
    assert expected != list(ask(shared_engine(), _PROMPT, **_LONG).token_ids[0])


def test_biases_are_added_to_the_logits() -> None:
    plain = ask(shared_engine(), _PROMPT, **_LONG).token_ids[0]
    banned = dict.fromkeys(plain[:3], -100.0) | {7: 2.5}
    expected = penalised_greedy(build_model("llama", 2, seed=31), _PROMPT, 24, bias=banned)
    output = ask(shared_engine(), _PROMPT, logit_bias=tuple(banned.items()), **_LONG)
    assert list(output.token_ids[0]) == expected
    assert not set(plain[:3]) & set(expected)
    forced = ask(shared_engine(), _PROMPT, logit_bias=((9, 100.0),), **_LONG)
    assert forced.token_ids[0] == (9,) * 24


def test_a_neighbours_penalties_change_nothing() -> None:
    requests = [
        make_request(_PROMPT, **_LONG),
        make_request(_PROMPT, presence_penalty=2.0, logit_bias=((9, 50.0),), **_LONG),
        make_request(_PROMPT, logprobs=3, **_LONG),
    ]
    plain, _, reported = run_together(shared_engine(), requests)
    assert ids_of(plain) == ids_of(reported) == ask(shared_engine(), _PROMPT, **_LONG).token_ids[0]
    assert all(event.logprobs == () for event in plain)


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_logprobs_are_those_of_the_model(num_top: int) -> None:
    (events,) = run_together(
        shared_engine(), [make_request(_PROMPT, logprobs=num_top, n=2, **_LONG)]
    )
    for choice in (0, 1):
        own = [event for event in events if event.choice_index == choice]
        found = [position for event in own for position in event.logprobs]
        ids = ids_of(events, choice)
        assert tuple(position.chosen.token_id for position in found) == ids
        expected = reference_logprobs((*_PROMPT, *ids))[len(_PROMPT) - 1 :]
        for position, row in zip(found, expected, strict=True):
            check_position(position, row, num_top)


def test_logprobs_are_the_models_own_whatever_shapes_the_answer() -> None:
    shaping: dict[str, Any] = {
        "temperature": 1.3,
        "seed": 5,
        "top_p": 0.9,
        "presence_penalty": 1.0,
        "logit_bias": ((9, 3.0),),
    }
    (events,) = run_together(
        shared_engine(), [make_request(_PROMPT, logprobs=2, **shaping, **_LONG)]
    )
    ids = ids_of(events)
    expected = reference_logprobs((*_PROMPT, *ids))[len(_PROMPT) - 1 :]
    for event, row in zip(events, expected, strict=True):
        check_position(event.logprobs[0], row, 2)


def test_tokens_are_named_by_their_bytes() -> None:
    (events,) = run_together(shared_engine(), [make_request(_PROMPT, logprobs=20, **_LONG)])
    for event in events:
        for token in event.logprobs[0].top:
            # 255 is no byte of any UTF-8 text; the vocabulary marks special tokens with it.
            if token.token_id < 255:
                assert (token.token, token.is_special) == (bytes([token.token_id]), False)
            else:
                assert token.is_special
                assert token.token == (b"</s>" if token.token_id == EOS_ID else b"")


@pytest.mark.parametrize("length", [1, 2, 130])
def test_an_echo_reports_the_prompt_as_the_model_sees_it(length: int) -> None:
    prompt = random_prompt(length, seed=length)
    request = make_request(prompt, logprobs=2, max_new_tokens=2, ignore_eos=True, n=2)
    echoing = type(request)(
        request.request_id, prompt, request.sampling, request.compression, echo=True
    )
    (events,) = run_together(shared_engine(), [echoing])
    text = bytes(prompt).decode(errors="replace")
    for choice in (0, 1):
        first = next(event for event in events if event.choice_index == choice)
        assert first.text.startswith(text)
        assert [each.chosen.token_id for each in first.prompt_logprobs] == list(prompt)
        assert (first.prompt_logprobs[0].chosen.logprob, first.prompt_logprobs[0].top) == (None, ())
        if length > 1:
            expected = reference_logprobs(prompt)
            for position, row in zip(first.prompt_logprobs[1:], expected, strict=True):
                check_position(position, row, 2)
    assert sum(event.text.count(text) for event in events) == 2
    assert [len(event.prompt_logprobs) for event in events] == [length, length, 0, 0]


def test_a_token_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match=f"logit_bias.*0 to {VOCAB_SIZE - 1}, got 260"):
        shared_engine().prepare(make_request(_PROMPT, logit_bias=((VOCAB_SIZE, 1.0),)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 2.1),
        ("frequency_penalty", float("nan")),
        ("logprobs", 21),
        ("logit_bias", ((1, 101.0),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("logit_bias", tuple((token, 1.0) for token in range(1_025))),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
