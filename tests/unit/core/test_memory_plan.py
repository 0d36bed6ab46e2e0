"""Free memory is divided into pages and workspace, and what a prompt takes is counted right."""

from pathlib import Path
from typing import Any

import pytest
import torch

from snapkv_core import EngineConfig, ModelLoadError
from snapkv_core.engine import memory_plan
from snapkv_core.engine.memory_plan import (
    PrefillWorkspace,
    free_memory_bytes,
    held_memory_bytes,
    plan_memory,
)
from snapkv_core.kv_cache.layout import KVLayout
from snapkv_core.models.spec import ModelSpec
from tests.support.engines import make_engine
from tests.support.models import build_model

_CPU = torch.device("cpu")
_SPEC = ModelSpec(
    name="tiny",
    num_layers=2,
    num_q_heads=6,
    num_kv_heads=3,
    head_dim=8,
    hidden_size=40,
    intermediate_size=100,
    layer_weights=10_000,
    vocab_size=260,
    max_model_len=1_000,
    eos_token_ids=frozenset({1}),
)
#: A page is 16 tokens of 2 x 8 x 4 = 64 bytes, 1,024 bytes; a sequence has 6 page tables.
_LAYOUT = KVLayout(num_layers=2, num_kv_heads=3, head_dim=8, element_bytes=4, page_size=16)
_WORKSPACE = PrefillWorkspace(
    spec=_SPEC, element_bytes=4, kv_element_bytes=4, max_slice_tokens=256, max_window_size=64
)
_LARGE = 10**12


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plan with a given amount of free memory."""

    def plan_with(free_bytes: int, **settings: Any) -> memory_plan.MemoryPlan:
        monkeypatch.setattr(memory_plan, "free_memory_bytes", lambda _: free_bytes)
        config = EngineConfig(**settings)
        return plan_memory(config, _LAYOUT, _WORKSPACE, _CPU)

    return plan_with


def test_a_prompt_takes_its_buffers_and_one_slice() -> None:
    # By hand, for a prompt shorter than window and slice: hidden states 40 and rotation 16 numbers
    # a token, keys and values 48, votes 12, logits of two query heads of 10 queries twice over.
    per_token = 4 * (40 + 16 + 48 + 12 + 2 * 10 * 2)
    in_slice = 4 * (2 * 100 + 4 * 40 + 3 * 48)
    assert _WORKSPACE.bytes_for(10) == 10 * (per_token + in_slice)


def test_longer_prompts_take_more_but_for_the_slice() -> None:
    sizes = [_WORKSPACE.bytes_for(length) for length in (1, 10, 64, 256, 257, 1_000)]
    assert sizes == sorted(sizes)
    # Beyond window and slice each token costs its buffers only.
    per_token = 4 * (40 + 16 + 48 + 12 + 2 * 64 * 2)
    assert _WORKSPACE.bytes_for(1_000) - _WORKSPACE.bytes_for(900) == 100 * per_token


def test_all_that_could_ever_be_used_is_the_most_that_is_taken(plan: Any) -> None:
    found = plan(_LARGE, max_num_seqs=5, overtake_max_tokens=100)
    # 1,000 tokens are 63 pages of 16 in each of 6 page tables.
    assert found.num_pages == 5 * 6 * 63
    assert found.workspace_bytes == _WORKSPACE.bytes_for(1_000) + _WORKSPACE.bytes_for(100)


@pytest.mark.parametrize(("fraction", "share"), [(None, 0.4), (0.5, 0.5), (1.0, 1.0)])
def test_of_scarce_memory_a_share_is_taken_and_prompts_get_at_most_half(
    plan: Any, fraction: float | None, share: float
) -> None:
    free_bytes = 1_000_000
    found = plan(free_bytes, kv_memory_fraction=fraction, max_num_seqs=1_000)
    taken = int(free_bytes * share)
    assert found.workspace_bytes == taken // 2
    assert found.num_pages == (taken - taken // 2) // 1_024


def test_a_pool_of_a_given_size_is_taken_as_it_is(plan: Any) -> None:
    assert plan(_LARGE, kv_cache_bytes=100 * 1_024 + 1_023).num_pages == 100
    assert plan(1_000_000, kv_cache_bytes=600 * 1_024).num_pages == 600


def test_a_pool_for_not_one_sequence_is_refused_with_both_numbers(plan: Any) -> None:
    assert plan(_LARGE, kv_cache_bytes=6 * 1_024).num_pages == 6
    with pytest.raises(
        ModelLoadError, match="5 pages of 1024 bytes; the shortest sequence needs 6"
    ):
        plan(_LARGE, kv_cache_bytes=6 * 1_024 - 1)
    with pytest.raises(ModelLoadError, match="kv_cache_bytes"):
        make_engine(build_model("llama", 2), kv_cache_bytes=100)


def test_an_engine_has_the_pages_that_its_configuration_gives() -> None:
    # 4 layers x 2 KV heads; a page of 8 tokens x 2 x 16 numbers x 4 bytes.
    page_bytes = 8 * 2 * 16 * 4
    engine = make_engine(build_model("llama", 2), kv_cache_bytes=50 * page_bytes, page_size=8)
    assert engine.parts.layout.page_bytes == page_bytes
    assert engine.parts.manager.num_pages_total == 50
    assert engine.parts.ledger.num_pages_total == 50


def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory_plan, "_CGROUP_LIMITS", (limit, tmp_path / "missing"))
    unlimited = free_memory_bytes(_CPU)
    assert unlimited > 0
    limit.write_text("max\n")
    assert free_memory_bytes(_CPU) == pytest.approx(unlimited, rel=0.2)
    resident = held_memory_bytes(_CPU)
    assert resident > 10_000_000
    limit.write_text(f"{resident + 5_000_000}\n")
    assert free_memory_bytes(_CPU) == pytest.approx(5_000_000, abs=4_000_000)
