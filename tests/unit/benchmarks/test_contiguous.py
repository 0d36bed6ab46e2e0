"""The contiguous side of the decode benchmark does the work that it is compared with."""

import pytest
import torch

from benchmarks.contiguous import ConsecutiveReads, contiguous_ratio
from benchmarks.engine_decode import DecodeFigure
from snapkv_core.attention.tiled_decode import TiledDecode
from snapkv_core.kv_cache.layout import KVLayout
from snapkv_core.kv_cache.manager import KVCacheManager


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_consecutive_reads_give_the_paged_answer_where_pages_are_consecutive(
    dtype: torch.dtype,
) -> None:
    layout = KVLayout(1, 2, 8, dtype.itemsize, page_size=64)
    manager = KVCacheManager(
        layout, num_pages=8, max_num_seqs=1, dtype=dtype, device=torch.device("cpu")
    )
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 150, 8, generator=generator).to(dtype)
    manager.reserve(1)
    manager.write_layer(1, 0, keys, values)
    step = manager.begin_step([1])
    manager.append(step, 0, keys[None, :, 0], values[None, :, 0])
    (stored,) = step.layers
    query = torch.randn(1, 4, 8, generator=generator).to(dtype)
    paged = TiledDecode().run(query, stored, scaling=0.3)
    # The pool hands its pages out from the highest id down; laid the other way round they are in
    # the order of consecutive reads.
    assert stored.page_ids.flatten().tolist() == [6, 5, 4, 3, 2, 1]
    for pages in (stored.k_pages, stored.v_pages):
        pages[1:7] = pages[1:7].flip(0)
    consecutive = ConsecutiveReads(num_pages=6).run(query, stored, scaling=0.3)
    assert torch.equal(consecutive, paged)


def test_ratio_is_the_paged_step_over_the_contiguous_one() -> None:
    paged, contiguous = (
        DecodeFigure("snapkv", "float32", 1024, 8, step_ms, 1.0, 1) for step_ms in (116.0, 100.0)
    )
    ratio = contiguous_ratio(paged, contiguous)
    assert ratio.value == pytest.approx(1.16)
    assert not ratio.is_met
    assert ratio.name == "engine/float32/decode step, paged over contiguous, 8x1024"
