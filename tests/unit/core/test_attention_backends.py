"""Each attention backend computes attention, and no neighbour, page or cut changes a bit of it."""

import itertools
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from snapkv_core.attention import choice
from snapkv_core.attention.base import AttentionBackend
from snapkv_core.attention.choice import choose_backend
from snapkv_core.attention.flash import FlashBackend, load_flash_function
from snapkv_core.attention.matmul import MatmulBackend
from snapkv_core.attention.sdpa import SdpaBackend
from snapkv_core.errors import InvalidParameterError, ModelLoadError
from snapkv_core.kv_cache.layout import KVLayout
from snapkv_core.kv_cache.manager import KVCacheManager
from tests.oracles.dense_attention import attend, causal, causal_einsum
from tests.support.engines import make_engine
from tests.support.models import build_model

_CPU: Final = torch.device("cpu")
_HEAD_DIM: Final = 16
_NUM_Q_HEADS: Final = 6
_NUM_LAYERS: Final = 2
_SCALING: Final = 0.3
_PAGE_SIZES: Final = (1, 16, 64)

#: Query groups of one head, of three and of all.
every_group = pytest.mark.parametrize("num_kv_heads", [6, 2, 1])
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Draw numbers that spread attention logits by about one."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[SdpaBackend, MatmulBackend], ids=["sdpa", "matmul"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    """Build each backend that runs on a CPU."""
    built: AttentionBackend = request.param()
    return built


class Stored:
    """Sequences of ragged length in a real store, and a query of each for one decode step.

    What a sequence holds depends on its number alone, not on its company.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        *,
        num_kv_heads: int,
        page_size: int,
        dtype: torch.dtype,
        even_layers: bool = False,
    ) -> None:
        layout = KVLayout(_NUM_LAYERS, num_kv_heads, _HEAD_DIM, dtype.itemsize, page_size)
        self.manager = KVCacheManager(
            layout, num_pages=60_000 // page_size, max_num_seqs=32, dtype=dtype, device=_CPU
        )
        self.numbers = numbers
        self.num_kv_heads = num_kv_heads
        for number in numbers:
            self._write(number, even_layers)
        step = self.manager.begin_step(numbers)
        for layer_idx in range(_NUM_LAYERS):
            new = [noise(2, num_kv_heads, _HEAD_DIM, seed=90 + n).to(dtype) for n in numbers]
            keys, values = torch.stack(new, dim=1)
            self.manager.append(step, layer_idx, keys, values)
        self.layers = step.layers
        self.query = torch.stack(
            [noise(_NUM_Q_HEADS, _HEAD_DIM, seed=500 + number).to(dtype) for number in numbers]
        )

    def decode(self, backend: AttentionBackend, layer_idx: int) -> Tensor:
        """Attend in one layer."""
        return backend.decode(self.query, self.layers[layer_idx], scaling=_SCALING)

    def expected(self, layer_idx: int) -> Tensor:
        """Compute the same with loops in float64 from what the store says it holds."""
        output = torch.zeros(self.query.shape, dtype=torch.float64)
        for row, number in enumerate(self.numbers):
            stored = self.manager.stored(number, layer_idx)
            for head in range(_NUM_Q_HEADS):
                keys, values = stored[head * self.num_kv_heads // _NUM_Q_HEADS]
                output[row, head] = attend(self.query[row, head], keys, values, _SCALING)
        return output

    def _write(self, number: int, even_layers: bool) -> None:
        self.manager.reserve(number)
        # Lengths around the borders of pages and tiles, and some of many tiles.
        longest = (1, 3, 15, 16, 17, 62, 63, 64, 65, 127, 128, 200, 300, 461, 5, 640, 90)[number]
        keys = noise(self.num_kv_heads, longest, _HEAD_DIM, seed=number)
        values = noise(self.num_kv_heads, longest, _HEAD_DIM, seed=1_000 + number)
        for layer_idx in range(_NUM_LAYERS):
            lens = [
                max(1, longest - (7 * head + 70 * ((layer_idx + number) % 2)) * (not even_layers))
                for head in range(self.num_kv_heads)
            ]
            indices = torch.arange(max(lens)).expand(self.num_kv_heads, -1)
            self.manager.write_layer(
                *(number, layer_idx, keys, values),
                kept_indices=indices,
                kept_lens=torch.tensor(lens),
            )


@every_group
@every_dtype
@pytest.mark.parametrize("even_layers", [True, False])
def test_decode_is_attention_over_what_each_head_holds(
    backend: AttentionBackend, num_kv_heads: int, dtype: torch.dtype, even_layers: bool
) -> None:
    stored = Stored(
        [3, 7, 0, 10, 6, 11],
        num_kv_heads=num_kv_heads,
        page_size=16,
        dtype=dtype,
        even_layers=even_layers,
    )
    for layer_idx in range(_NUM_LAYERS):
        found = stored.decode(backend, layer_idx)
        assert found.dtype is dtype
        error = (found.double() - stored.expected(layer_idx)).abs().max()
        # It computes in float32 and rounds once, at the end.
        assert error < (1e-5 if dtype is torch.float32 else 8e-3)


@every_dtype
@every_group
def test_decode_of_a_sequence_does_not_depend_on_company_or_page_size(
    backend: AttentionBackend, dtype: torch.dtype, num_kv_heads: int
) -> None:
    crowds = [
        Stored(list(range(17)), num_kv_heads=num_kv_heads, page_size=page_size, dtype=dtype)
        for page_size in _PAGE_SIZES
    ]
    for number, page_size in itertools.product(range(17), _PAGE_SIZES):
        alone = Stored([number], num_kv_heads=num_kv_heads, page_size=page_size, dtype=dtype)
        for layer_idx in range(_NUM_LAYERS):
            expected = alone.decode(backend, layer_idx)[0]
            for crowd in crowds:
                found = crowd.decode(backend, layer_idx)[number]
                assert torch.equal(found, expected), (number, page_size, layer_idx)


def test_decode_of_a_pair_equals_decode_alone_whoever_the_other_is() -> None:
    backend = SdpaBackend()
    for first, second in ((7, 8), (8, 7), (0, 15), (15, 0), (12, 4)):
        pair = Stored([first, second], num_kv_heads=2, page_size=16, dtype=torch.float32)
        alone = Stored([first], num_kv_heads=2, page_size=16, dtype=torch.float32)
        assert torch.equal(pair.decode(backend, 1)[0], alone.decode(backend, 1)[0])


def test_a_broken_sequence_spoils_no_neighbour(backend: AttentionBackend) -> None:
    stores = [Stored([5, 9], num_kv_heads=2, page_size=16, dtype=torch.float32) for _ in range(2)]
    query, (sound, mixed) = stores[0].query, (stored.manager for stored in stores)
    broken = torch.full((2, 100, _HEAD_DIM), float("nan"))
    mixed.reserve(30)
    for layer_idx in range(_NUM_LAYERS):
        mixed.write_layer(30, layer_idx, broken, broken)
    layer = mixed.begin_step([30, 5, 9]).layers[0]
    found = backend.decode(torch.cat((query[:1], query)), layer, scaling=_SCALING)
    expected = backend.decode(query, sound.begin_step([5, 9]).layers[0], scaling=_SCALING)
    assert found[0].isnan().all()
    assert torch.equal(found[1:], expected)


@every_group
def test_prefill_is_causal_attention_to_all_before(
    backend: AttentionBackend, num_kv_heads: int
) -> None:
    for seen, chunk_len in ((1, 1), (9, 9), (30, 7), (70, 1)):
        query = noise(_NUM_Q_HEADS, chunk_len, _HEAD_DIM, seed=1)
        keys = noise(num_kv_heads, seen, _HEAD_DIM, seed=2)
        values = noise(num_kv_heads, seen, _HEAD_DIM, seed=3)
        found = backend.prefill(query, keys, values, scaling=_SCALING)
        expected = causal(query, keys, values, _SCALING)
        assert found.shape == query.shape
        assert (found - expected).abs().max() < 1e-5


@every_group
def test_prefill_of_several_cells_of_the_grid_is_causal_attention(
    backend: AttentionBackend, num_kv_heads: int
) -> None:
    seen = 1_100
    keys = noise(num_kv_heads, seen, _HEAD_DIM, seed=2)
    values = noise(num_kv_heads, seen, _HEAD_DIM, seed=3)
    query = noise(_NUM_Q_HEADS, seen, _HEAD_DIM, seed=1)
    expected = causal_einsum(query, keys, values, _SCALING)
    for start in (0, 256, 512, 1_024):
        found = backend.prefill(query[:, start:], keys, values, scaling=_SCALING)
        assert (found - expected[:, start:]).abs().max() < 1e-5


@every_dtype
def test_no_bit_of_prefill_depends_on_where_a_prompt_is_cut(
    backend: AttentionBackend, dtype: torch.dtype
) -> None:
    seen, grid = 1_317, backend.grid_tokens
    query = noise(_NUM_Q_HEADS, seen, _HEAD_DIM, seed=1).to(dtype)
    # The engine attends in float32 on a CPU whatever the format of the model.
    keys, values = noise(2, 2, seen, _HEAD_DIM, seed=2)
    whole = backend.prefill(query, keys, values, scaling=_SCALING)
    assert whole.dtype is dtype
    for cells in ([1] * 6, [2, 2, 2], [3, 3], [5, 1], [1, 4, 1]):
        borders = [min(grid * sum(cells[:i]), seen) for i in range(len(cells) + 1)]
        parts = [
            backend.prefill(query[:, start:end], keys[:, :end], values[:, :end], scaling=_SCALING)
            for start, end in itertools.pairwise(borders)
        ]
        assert torch.equal(torch.cat(parts, dim=1), whole), cells


class RecordedFlash:
    """Stands in for `flash_attn.flash_attn_func` of flash-attn 2.8.3: its signature and its rules.

    Tensors are `[batch, seqlen, heads, head_dim]`, the causal mask is aligned to the bottom right,
    and query head h attends to KV head h // (heads / kv_heads).
    """

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> Tensor:
        """Compute attention as documented."""
        self.calls += 1
        batch, num_queries, num_q_heads, head_dim = q.shape
        assert k.shape == v.shape == (batch, k.shape[1], k.shape[2], head_dim)
        assert num_q_heads % k.shape[2] == 0
        assert q.dtype == k.dtype == v.dtype, "the kernel takes one number format"
        assert q.dtype in (torch.float16, torch.bfloat16)
        assert all(x.stride(-1) == 1 for x in (q, k, v)), "else the package copies"
        assert (dropout_p, window_size, softcap) == (0.0, (-1, -1), 0.0)
        assert alibi_slopes is None
        assert causal
        assert not return_attn_probs, "then it would return a tuple"
        del deterministic
        scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        query, keys, values = (x[0].transpose(0, 1) for x in (q, k, v))
        output = causal_einsum(query, keys, values, scale)
        assert batch == 1
        assert num_queries == output.shape[1]
        return output.transpose(0, 1)[None].to(q.dtype)


@every_group
@pytest.mark.parametrize(("seen", "chunk_len"), [(1, 1), (40, 40), (40, 13), (300, 280)])
def test_flash_gets_its_own_layout_and_gives_what_sdpa_gives(
    num_kv_heads: int, seen: int, chunk_len: int
) -> None:
    function = RecordedFlash()
    query = noise(_NUM_Q_HEADS, chunk_len, _HEAD_DIM, seed=1).bfloat16()
    keys, values = noise(2, num_kv_heads, seen, _HEAD_DIM, seed=2).bfloat16()
    found = FlashBackend(function).prefill(query, keys, values, scaling=_SCALING)
    expected = SdpaBackend().prefill(query.float(), keys.float(), values.float(), scaling=_SCALING)
    assert function.calls == 1
    assert found.shape == query.shape
    assert found.dtype is torch.bfloat16
    assert (found.float() - expected).abs().max() < 0.02


def test_flash_decodes_as_the_others_do() -> None:
    stored = Stored([3, 11, 0], num_kv_heads=2, page_size=16, dtype=torch.bfloat16)
    found = stored.decode(FlashBackend(RecordedFlash()), 0)
    assert torch.equal(found, stored.decode(SdpaBackend(), 0))


@pytest.mark.parametrize(
    ("name", "expected"), [("auto", "sdpa"), ("sdpa", "sdpa"), ("matmul", "matmul")]
)
def test_a_cpu_gets_the_backend_that_runs_on_it(name: str, expected: str) -> None:
    assert choose_backend(name, _CPU, torch.bfloat16).name == expected
    engine = make_engine(build_model("llama", 2, seed=3), attention_backend=name)
    assert engine.parts.backend.name == expected


def test_flash_on_a_cpu_is_refused_with_what_it_needs() -> None:
    with pytest.raises(InvalidParameterError, match="this is cpu with float32"):
        choose_backend("flash", _CPU, torch.float32)
    with pytest.raises(ModelLoadError, match="flash needs a CUDA device"):
        make_engine(build_model("llama", 2, seed=3), attention_backend="flash")


def test_flash_is_taken_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    loaded: list[tuple[Any, ...]] = []

    def load(*arguments: Any) -> Callable[..., Tensor]:
        loaded.append(arguments)
        return RecordedFlash()

    monkeypatch.setattr(choice, "load_flash_function", load)
    for name in ("auto", "flash"):
        assert choose_backend(name, cuda, torch.bfloat16).name == "flash"
    assert loaded == [(cuda, torch.bfloat16)] * 2
    assert choose_backend("sdpa", cuda, torch.bfloat16).name == "sdpa"


def test_flash_is_not_looked_for_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    fake = SimpleNamespace(flash_attn_func=RecordedFlash())
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    assert load_flash_function(cuda, torch.bfloat16) is fake.flash_attn_func
    assert load_flash_function(cuda, torch.float32) is None
    assert load_flash_function(_CPU, torch.bfloat16) is None
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert load_flash_function(cuda, torch.bfloat16) is None
    assert choose_backend("auto", cuda, torch.bfloat16).name == "sdpa"
