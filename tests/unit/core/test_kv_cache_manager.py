"""The KV store keeps exactly the chosen entries of each KV head, in order, and frees them all."""

import pytest
import torch

from snapkv_core import KVCacheError
from snapkv_core.kv_cache.layout import KVLayout
from snapkv_core.kv_cache.manager import KVCacheManager

_LAYOUT = KVLayout(num_layers=2, num_kv_heads=3, head_dim=4, element_bytes=4, page_size=4)
_ENTRY_BYTES = 2 * 4 * 4


def new_manager() -> KVCacheManager:
    """Build an empty store."""
    return KVCacheManager(_LAYOUT, dtype=torch.float32, device=torch.device("cpu"))


def prompt_kv(prompt_len: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one layer's keys and values."""
    generator = torch.Generator().manual_seed(seed)
    shape = (_LAYOUT.num_kv_heads, prompt_len, _LAYOUT.head_dim)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def write_ragged(manager: KVCacheManager, seq_id: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Store a prompt whose heads keep 4, 2 and 3 of 9 tokens, in both layers."""
    manager.reserve(seq_id, max_new_tokens=2)
    written = []
    for layer_idx in range(2):
        keys, values = prompt_kv(9, seed=10 * seq_id + layer_idx)
        manager.write_layer(
            seq_id,
            layer_idx,
            keys,
            values,
            kept_indices=torch.tensor([[0, 2, 7, 8], [5, 8, 8, 8], [1, 7, 8, 8]]),
            kept_lens=torch.tensor([4, 2, 3]),
        )
        written.append((keys, values))
    return written


_KEPT = [[0, 2, 7, 8], [5, 8], [1, 7, 8]]


def test_each_head_holds_its_own_kept_tokens_and_then_the_new_ones() -> None:
    manager = new_manager()
    written = write_ragged(manager, 1)
    new = [prompt_kv(2, seed=77 + layer) for layer in range(2)]
    for step in range(2):
        for layer_idx, (keys, values) in enumerate(new):
            manager.append([1], layer_idx, keys[None, :, step], values[None, :, step])
        manager.check_integrity()
    for layer_idx, (keys, values) in enumerate(written):
        view = manager.view(1, layer_idx)
        assert view.kv_lens.tolist() == [6, 4, 5]
        for head, kept in enumerate(_KEPT):
            length = len(kept) + 2
            expected = torch.cat([keys[head, kept], new[layer_idx][0][head]])
            assert torch.equal(view.keys[head, :length], expected)
            expected = torch.cat([values[head, kept], new[layer_idx][1][head]])
            assert torch.equal(view.values[head, :length], expected)
    assert torch.isfinite(manager.view(1, 0).keys).all(), "unused slots are read with weight 0"


def test_counts_are_of_kept_entries_per_kv_head() -> None:
    manager = new_manager()
    write_ragged(manager, 1)
    assert manager.prompt_entries(1) == 3.0
    assert manager.prompt_bytes(1) == 2 * (4 + 2 + 3) * _ENTRY_BYTES
    # Room for the longest head and the answer, and not a byte of the dropped tokens.
    assert manager.allocated_bytes() <= 2 * 3 * (4 + 2) * _ENTRY_BYTES


def test_writing_without_indices_keeps_everything() -> None:
    manager = new_manager()
    manager.reserve(1, max_new_tokens=1)
    keys, values = prompt_kv(5)
    manager.write_layer(1, 0, keys, values)
    view = manager.view(1, 0)
    assert torch.equal(view.keys, keys)
    assert torch.equal(view.values, values)
    assert view.kv_lens.tolist() == [5, 5, 5]


def test_the_store_keeps_no_reference_to_the_prompts_buffer() -> None:
    manager = new_manager()
    manager.reserve(1, max_new_tokens=1)
    keys, values = prompt_kv(5)
    before = keys.clone()
    manager.write_layer(1, 0, keys, values)
    keys.zero_()
    assert torch.equal(manager.view(1, 0).keys, before)


def test_sequences_and_padding_rows_do_not_mix() -> None:
    manager = new_manager()
    for seq_id in (1, 2):
        write_ragged(manager, seq_id)
    keys, values = torch.randn(4, 3, 4), torch.randn(4, 3, 4)
    first = manager.view(1, 0).keys.clone()
    manager.append([2, 1], 0, keys, values)
    for row, seq_id in enumerate([2, 1]):
        view = manager.view(seq_id, 0)
        for head, kept in enumerate(_KEPT):
            assert torch.equal(view.keys[head, len(kept)], keys[row, head])
            assert torch.equal(view.values[head, len(kept)], values[row, head])
    assert torch.equal(manager.view(1, 0).keys[0, :4], first[0, :4])


def test_a_fork_goes_its_own_way() -> None:
    manager = new_manager()
    write_ragged(manager, 1)
    manager.fork(1, 2)
    manager.append([2], 0, torch.ones(1, 3, 4), torch.ones(1, 3, 4))
    assert manager.view(1, 0).kv_lens.tolist() == [4, 2, 3]
    assert manager.view(2, 0).kv_lens.tolist() == [5, 3, 4]
    manager.append([1], 0, torch.zeros(1, 3, 4), torch.zeros(1, 3, 4))
    assert torch.equal(manager.view(2, 0).keys[0, 4], torch.ones(4))
    manager.free(1)
    assert torch.equal(manager.view(2, 0).keys[0, 4], torch.ones(4))
    manager.check_integrity()


def test_freeing_returns_every_byte_and_may_be_repeated() -> None:
    manager = new_manager()
    for seq_id in (1, 2):
        write_ragged(manager, seq_id)
    alone = manager.allocated_bytes(2)
    manager.free(1)
    manager.free(1)
    assert manager.allocated_bytes() == alone > 0
    manager.free(2)
    assert manager.allocated_bytes() == 0
    write_ragged(manager, 1)


def test_a_token_beyond_the_reservation_is_refused() -> None:
    manager = new_manager()
    write_ragged(manager, 1)
    token = torch.ones(1, 3, 4)
    for _ in range(2):
        manager.append([1], 0, token, token)
    with pytest.raises(KVCacheError):
        manager.append([1], 0, token, token)


def test_unknown_and_doubled_sequences_are_refused() -> None:
    manager = new_manager()
    keys, values = prompt_kv(5)
    with pytest.raises(KVCacheError):
        manager.write_layer(9, 0, keys, values)
    with pytest.raises(KVCacheError):
        manager.view(9, 0)
    with pytest.raises(KVCacheError):
        manager.fork(9, 1)
    write_ragged(manager, 1)
    with pytest.raises(KVCacheError):
        manager.reserve(1, max_new_tokens=1)
    with pytest.raises(KVCacheError):
        manager.write_layer(1, 0, keys, values)
    with pytest.raises(KVCacheError):
        manager.fork(1, 1)
