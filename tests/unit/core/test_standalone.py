"""`snapkv_select` on a user's own tensors keeps what the loops keep, for each prompt of a batch."""

import pytest
import torch

from snapkv_core import InvalidParameterError, snapkv_select
from tests.oracles.snapkv_loops import select_by_loops


def random_batch(prompt_len: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw window queries, keys and values of two prompts with three query heads per KV head."""
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(2, 6, 4, 8, generator=generator)
    keys = torch.randn(2, 2, prompt_len, 8, generator=generator)
    values = torch.randn(2, 2, prompt_len, 5, generator=generator)
    return queries * 2, keys * 2, values


def test_keys_and_values_are_those_of_the_tokens_the_loops_keep() -> None:
    queries, keys, values = random_batch(40)
    kept_keys, kept_values = snapkv_select(queries, keys, values, max_capacity=15, kernel_size=3)
    assert kept_keys.shape == (2, 2, 15, 8)
    assert kept_values.shape == (2, 2, 15, 5)
    for prompt in range(2):
        expected = select_by_loops(
            queries[prompt],
            keys[prompt],
            max_capacity_prompt=15,
            kernel_size=3,
            pooling="avg",
            scaling=8**-0.5,
        )
        for head in range(2):
            tokens = expected.indices[head]
            assert torch.equal(kept_keys[prompt, head], keys[prompt, head, tokens])
            assert torch.equal(kept_values[prompt, head], values[prompt, head, tokens])


@pytest.mark.parametrize("prompt_len", [3, 4, 14, 15])
def test_a_prompt_that_fits_the_capacity_comes_back_whole(prompt_len: int) -> None:
    queries, keys, values = random_batch(prompt_len)
    kept_keys, kept_values = snapkv_select(queries, keys, values, max_capacity=15)
    assert torch.equal(kept_keys, keys)
    assert torch.equal(kept_values, values)


def test_one_token_beyond_the_capacity_is_compressed() -> None:
    queries, keys, values = random_batch(16)
    assert snapkv_select(queries, keys, values, max_capacity=15)[0].shape[2] == 15


def test_an_even_kernel_and_a_capacity_inside_the_window_are_refused() -> None:
    queries, keys, values = random_batch(40)
    with pytest.raises(InvalidParameterError, match="kernel_size"):
        snapkv_select(queries, keys, values, max_capacity=15, kernel_size=4)
    with pytest.raises(InvalidParameterError, match="max_capacity"):
        snapkv_select(queries, keys, values, max_capacity=4)
