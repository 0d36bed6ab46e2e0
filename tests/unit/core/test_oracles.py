"""The oracles are right: by hand, against the models' own forward, and against each other."""

from typing import Any

import pytest
import torch

from tests.oracles.masked_decode import Knobs, MaskedDecoder
from tests.oracles.snapkv_loops import keep_best, pool, select_by_loops
from tests.support.models import (
    FAMILIES,
    NUM_KV_HEADS,
    build_model,
    greedy_reference,
    random_prompt,
)


def test_loops_give_a_selection_computed_by_hand() -> None:
    # Zero queries look everywhere alike: window rows see 4 and 5 tokens, so each of the three
    # prefix tokens gets (1/4 + 1/5) / 2, and the earliest wins the one place.
    found = select_by_loops(
        torch.zeros(1, 2, 4),
        torch.randn(1, 5, 4),
        max_capacity_prompt=3,
        kernel_size=1,
        pooling="avg",
        scaling=0.5,
    )
    assert found.attention[0] == pytest.approx([0.225] * 3)
    assert found.indices == [[0, 3, 4]]
    assert found.kept_attention_mass == pytest.approx([1 / 3])


def test_loops_pool_without_counting_what_lies_outside() -> None:
    assert pool([3.0, 0.0, 0.0, 9.0], kernel_size=3, pooling="avg") == [1.5, 1.0, 3.0, 4.5]
    assert pool([3.0, 0.0, 0.0, 9.0], kernel_size=3, pooling="max") == [3.0, 3.0, 9.0, 9.0]
    assert keep_best([1.0, 2.0, 2.0, 2.0], budget=2, window_size=1) == [1, 2, 4]


@pytest.mark.parametrize("num_kv_heads", NUM_KV_HEADS)
@pytest.mark.parametrize("family", FAMILIES)
def test_masked_decoder_with_nothing_dropped_is_the_model(family: str, num_kv_heads: int) -> None:
    model = build_model(family, num_kv_heads, seed=1)
    prompt = random_prompt(150, seed=2)
    generated = greedy_reference(model, prompt, 32)
    exact = build_model(family, num_kv_heads, seed=1).double()
    with torch.no_grad():
        own = exact(torch.tensor([[*prompt, *generated[:-1]]])).logits[0, len(prompt) - 1 :]

    found = MaskedDecoder(model).run(prompt, generated)
    everything = [[range(len(prompt))] * num_kv_heads] * model.config.num_hidden_layers
    all_kept = MaskedDecoder(model).run(prompt, generated, kept=everything)

    assert found.kept == []
    assert (found.logits - own).abs().max() < 1e-5
    assert torch.equal(found.logits, all_kept.logits)


def test_masked_decoder_hides_the_prompt_from_generated_tokens_only() -> None:
    model = build_model("llama", 2, seed=3)
    prompt = random_prompt(60, seed=3)
    generated = greedy_reference(model, prompt, 8)
    decoder = MaskedDecoder(model)

    full = decoder.run(prompt, generated)
    masked = decoder.run(prompt, generated, kept=[[range(50, 60)] * 2] * 4)

    # The first generated token is predicted by the prompt's last token, which sees everything.
    assert torch.equal(full.logits[0], masked.logits[0])
    assert ((full.logits[1:] - masked.logits[1:]).abs().amax(dim=-1) > 1e-2).all()


@pytest.mark.parametrize("pooling", ["avg", "max"])
def test_both_oracles_keep_the_same_tokens(pooling: str) -> None:
    model = build_model("mistral", 2, seed=4, num_hidden_layers=1)
    prompt = random_prompt(70, seed=4)
    knobs = Knobs(max_capacity_prompt=24, window_size=6, kernel_size=5, pooling=pooling)
    found = MaskedDecoder(model).run(prompt, [0, 0], knobs=knobs)

    queries, keys = _roped(model, prompt)
    loops = select_by_loops(
        queries[:, -6:],
        keys,
        max_capacity_prompt=24,
        kernel_size=5,
        pooling=pooling,
        scaling=16**-0.5,
    )
    assert found.kept[0] == loops.indices
    assert found.kept_attention_mass[0] == pytest.approx(loops.kept_attention_mass, abs=1e-5)


def _roped(model: Any, prompt: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the first layer's roped queries and keys from transformers' own modules."""
    from transformers.models.mistral.modeling_mistral import apply_rotary_pos_emb

    layer = model.model.layers[0]
    with torch.no_grad():
        hidden = model.model.embed_tokens(torch.tensor([list(prompt)]))
        cos, sin = model.model.rotary_emb(hidden, torch.arange(len(prompt))[None])
        normed = layer.input_layernorm(hidden)
        shape = (1, len(prompt), -1, 16)
        query = layer.self_attn.q_proj(normed).view(shape).transpose(1, 2)
        key = layer.self_attn.k_proj(normed).view(shape).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
    return query[0], key[0]
