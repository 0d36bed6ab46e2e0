"""What one layer keeps equals the loop oracle, on random tensors, ties, odd and even sizes."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from snapkv_core import CompressionConfig, InvalidParameterError
from snapkv_core.compression.observation import observe_prefix, pool_scores
from snapkv_core.compression.policies import select_layer
from snapkv_core.compression.selection import select_tokens
from tests.oracles.snapkv_loops import (
    attention_on_prefix,
    keep_best,
    pool,
    select_by_loops,
)

#: Scores closer than this may be ordered either way in float32.
_FLOAT32_NOISE = 1e-6


def random_layer(
    num_kv_heads: int, group_size: int, window_size: int, prompt_len: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Draw window queries and keys of a layer with clearly uneven attention."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(num_kv_heads * group_size, window_size, 8, generator=generator)
    keys = torch.randn(num_kv_heads, prompt_len, 8, generator=generator)
    return queries * 1.5, keys * 1.5


@st.composite
def layers(draw: st.DrawFn) -> tuple[Tensor, Tensor, CompressionConfig]:
    """Draw a layer of any small shape and a configuration that compresses it."""
    prompt_len = draw(st.integers(3, 40))
    window_size = draw(st.integers(1, prompt_len - 2))
    config = CompressionConfig(
        max_capacity_prompt=draw(st.integers(window_size + 1, prompt_len - 1)),
        window_size=window_size,
        kernel_size=draw(st.sampled_from([1, 3, 5, 15, 63])),
        pooling=draw(st.sampled_from(["avg", "max"])),
    )
    queries, keys = random_layer(
        draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 2, 3])),
        window_size,
        prompt_len,
        draw(st.integers(0, 10_000)),
    )
    return queries, keys, config


@given(layers())
@settings(max_examples=150, deadline=None)
def test_kept_tokens_equal_the_loops(layer: tuple[Tensor, Tensor, CompressionConfig]) -> None:
    queries, keys, config = layer
    found = select_layer(config, queries, keys, scaling=8**-0.5)
    expected = select_by_loops(
        queries,
        keys,
        max_capacity_prompt=config.max_capacity_prompt,
        kernel_size=config.kernel_size,
        pooling=config.pooling,
        scaling=8**-0.5,
    )

    assert found.kept.lengths.tolist() == [config.max_capacity_prompt] * keys.shape[0]
    budget = config.max_capacity_prompt - config.window_size
    for head, margin in enumerate(expected.margins(budget)):
        kept = found.kept.indices[head].tolist()
        mass = float(found.kept_attention_mass[head])
        assert mass == pytest.approx(expected.kept_attention_mass[head], abs=1e-4)
        if margin > _FLOAT32_NOISE:
            if config.pooling == "max" or config.kernel_size == 1:
                assert kept == expected.indices[head]
            else:
                # A running average may round equal averages apart, so only the scores count.
                assert _scores(kept, expected.scores[head]) == pytest.approx(
                    _scores(expected.indices[head], expected.scores[head]), abs=_FLOAT32_NOISE
                )


def _scores(kept: list[int], scores: list[float]) -> list[float]:
    return sorted(scores[token] for token in kept if token < len(scores))


@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize(("window_size", "capacity"), [(4, 16), (5, 16), (4, 15), (1, 2), (8, 9)])
@pytest.mark.parametrize("prompt_len", [48, 49])
def test_named_sizes_keep_exactly_what_the_loops_keep(
    pooling: Any, window_size: int, capacity: int, prompt_len: int
) -> None:
    queries, keys = random_layer(2, 3, window_size, prompt_len, seed=prompt_len + capacity)
    config = CompressionConfig(
        max_capacity_prompt=capacity, window_size=window_size, kernel_size=5, pooling=pooling
    )
    found = select_layer(config, queries, keys, scaling=8**-0.5)
    expected = select_by_loops(
        queries,
        keys,
        max_capacity_prompt=capacity,
        kernel_size=5,
        pooling=pooling,
        scaling=8**-0.5,
    )
    assert min(expected.margins(capacity - window_size)) > _FLOAT32_NOISE, "choose another seed"
    assert found.kept.indices.tolist() == expected.indices
    assert found.kept_attention_mass.tolist() == pytest.approx(
        expected.kept_attention_mass, abs=1e-5
    )


@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (1, 1, 5, 6), (2, 3, 4, 30), (3, 1, 7, 8)])
def test_observed_attention_equals_the_loops(shape: tuple[int, int, int, int]) -> None:
    queries, keys = random_layer(*shape, seed=5)
    found = observe_prefix(queries, keys, scaling=0.3)
    expected = torch.tensor(attention_on_prefix(queries, keys, scaling=0.3))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=20),
    st.sampled_from([1, 3, 5, 21, 63]),
    st.sampled_from(["avg", "max"]),
)
@settings(deadline=None)
def test_pooling_counts_only_tokens_that_exist(
    row: list[int], kernel_size: int, pooling: Any
) -> None:
    found = pool_scores(torch.tensor([row]).float(), kernel_size=kernel_size, pooling=pooling)
    expected = pool([float(value) for value in row], kernel_size=kernel_size, pooling=pooling)
    assert found[0].tolist() == pytest.approx(expected, rel=1e-5)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_ties_go_to_the_earlier_token_and_heads_may_have_their_own_budgets(
    data: st.DataObject,
) -> None:
    num_heads = data.draw(st.integers(1, 4))
    prefix_len = data.draw(st.integers(1, 30))
    window_size = data.draw(st.integers(1, 5))
    # Four values over up to 30 tokens: nearly every cut falls inside a tie.
    row = st.lists(st.integers(0, 3), min_size=prefix_len, max_size=prefix_len)
    scores = data.draw(st.lists(row, min_size=num_heads, max_size=num_heads))
    budget = st.integers(0, prefix_len)
    budgets = data.draw(st.lists(budget, min_size=num_heads, max_size=num_heads))

    kept = select_tokens(
        torch.tensor(scores).float(), torch.tensor(budgets), window_size=window_size
    )

    assert kept.lengths.tolist() == [budget + window_size for budget in budgets]
    for head in range(num_heads):
        expected = keep_best(
            [float(score) for score in scores[head]],
            budget=budgets[head],
            window_size=window_size,
        )
        length = budgets[head] + window_size
        assert kept.indices[head, :length].tolist() == expected
        # Padding is read by a gather, so it must at least be a legal index.
        assert ((kept.indices >= 0) & (kept.indices < prefix_len + window_size)).all()


def test_a_long_row_of_equal_scores_keeps_its_beginning() -> None:
    kept = select_tokens(torch.ones(2, 5_000), torch.tensor([64, 64]), window_size=3)
    assert kept.indices.tolist() == [[*range(64), 5_000, 5_001, 5_002]] * 2


def test_the_window_is_kept_by_index_even_if_nothing_attends_to_it() -> None:
    queries, keys = random_layer(2, 2, 6, 40, seed=1)
    keys[:, -6:] = -50 * queries.mean(dim=(0, 1))
    config = CompressionConfig(max_capacity_prompt=10, window_size=6, kernel_size=1)
    found = select_layer(config, queries, keys, scaling=8**-0.5)
    assert found.kept.indices[:, -6:].tolist() == [list(range(34, 40))] * 2
    assert (found.kept.indices[:, :-6] < 34).all()


def test_the_window_does_not_see_its_own_future() -> None:
    queries, keys = random_layer(1, 1, 3, 20, seed=2)
    changed = keys.clone()
    changed[:, -1] = 100.0
    # Only the last query sees the last key: the other two rows' votes stay as they were.
    before = observe_prefix(queries[:, :2], keys[:, :-1], scaling=0.3) * 2
    after = observe_prefix(queries, changed, scaling=0.3) * 3
    last = attention_on_prefix(queries[:, 2:], changed, scaling=0.3)[0][:17]
    torch.testing.assert_close(after[0] - torch.tensor(last), before[0], atol=1e-6, rtol=1e-5)


def test_a_token_that_one_query_head_loves_beats_one_that_all_like_a_little() -> None:
    # The vote is the mean over the group of softmaxed attention, not of queries or logits.
    queries = torch.tensor([[[8.0, 0.0]], [[0.0, 1.0]]])
    keys = torch.zeros(1, 6, 2)
    keys[0, 1] = torch.tensor([3.0, -3.0])
    keys[0, 3] = torch.tensor([0.2, 0.2])
    config = CompressionConfig(max_capacity_prompt=2, window_size=1, kernel_size=1)
    assert select_layer(config, queries, keys, scaling=1.0).kept.indices.tolist() == [[1, 5]]


def test_scores_stay_float32_for_bfloat16_tensors() -> None:
    queries, keys = random_layer(2, 3, 8, 64, seed=9)
    config = CompressionConfig(max_capacity_prompt=24, window_size=8, kernel_size=3)
    found = observe_prefix(queries.bfloat16(), keys.bfloat16(), scaling=8**-0.5)
    kept = select_layer(config, queries.bfloat16(), keys.bfloat16(), scaling=8**-0.5).kept
    assert found.dtype == torch.float32
    assert kept.indices.shape == (2, 24)


@pytest.mark.parametrize("budget", [-1, 11])
def test_a_budget_outside_the_prefix_is_refused(budget: int) -> None:
    with pytest.raises(InvalidParameterError):
        select_tokens(torch.rand(2, 10), torch.tensor([5, budget]), window_size=2)


def test_a_prompt_without_a_prefix_is_refused() -> None:
    queries, keys = random_layer(1, 1, 4, 4, seed=0)
    with pytest.raises(InvalidParameterError):
        observe_prefix(queries, keys, scaling=1.0)


@pytest.mark.parametrize("kernel_size", [0, 2, 4, 16])
def test_an_even_kernel_is_refused(kernel_size: int) -> None:
    with pytest.raises(InvalidParameterError, match="kernel_size"):
        CompressionConfig(kernel_size=kernel_size)


@pytest.mark.parametrize("capacity", [1, 31, 32])
def test_a_capacity_no_greater_than_the_window_is_refused(capacity: int) -> None:
    with pytest.raises(InvalidParameterError, match="max_capacity_prompt"):
        CompressionConfig(max_capacity_prompt=capacity, window_size=32)
