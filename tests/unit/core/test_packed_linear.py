"""Packed linear layers give the product, and each row's alone whatever rows are beside it."""

from typing import Any

import pytest
import torch
from torch import nn

from snapkv_core import EngineConfig
from snapkv_core.models import packed_linear
from snapkv_core.models.loader import prepare_model
from snapkv_core.models.packed_linear import PackedLinear, pack_linears, padded_rows
from tests.support.engines import ask, make_engine
from tests.support.models import ByteTokenizer, build_model, greedy_reference, random_prompt


def new_linear(bias: bool, dtype: torch.dtype = torch.float32) -> nn.Linear:
    """Build a layer of odd sizes."""
    torch.manual_seed(1)
    return nn.Linear(67, 45, bias=bias).to(dtype)


def new_rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Draw inputs."""
    return torch.randn(*shape, 67, generator=torch.Generator().manual_seed(2)).to(dtype)


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 5), (2, 3, 4), (1, 700), (0,)])
def test_it_multiplies_as_linear_does(bias: bool, shape: tuple[int, ...]) -> None:
    linear = new_linear(bias)
    rows = new_rows(*shape)
    found = PackedLinear(linear, torch.float32)(rows)
    expected = rows.double() @ linear.weight.double().T
    if bias:
        expected += linear.bias.double()
    assert found.dtype is torch.float32
    assert found.shape == (*shape, 45)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
def test_bfloat16_goes_in_and_out_and_is_multiplied_in_float32(bias: bool) -> None:
    linear = new_linear(bias, torch.bfloat16)
    rows = new_rows(9, dtype=torch.bfloat16)
    found = PackedLinear(linear, torch.float32)(rows)
    expected = rows.float() @ linear.weight.float().T
    if bias:
        expected += linear.bias.float()
    assert found.dtype is torch.bfloat16
    # Sums are formed in float32 and rounded once: all but a few fall on the same side.
    assert (found == expected.bfloat16()).float().mean() > 0.99


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_among_any_number_of_rows(dtype: torch.dtype) -> None:
    packed = PackedLinear(new_linear(True, dtype), torch.float32)
    rows = new_rows(300, dtype=dtype)
    together = packed(rows)
    for num_rows in (*range(1, 40), 63, 64, 65, 127, 128, 200, 255, 256):
        assert torch.equal(packed(rows[:num_rows]), together[:num_rows]), num_rows
        assert torch.equal(packed(rows[-num_rows:]), together[-num_rows:]), num_rows


@torch.no_grad()
def test_the_layer_that_was_packed_is_left_as_it_was() -> None:
    linear = new_linear(True)
    before = linear.weight.clone()
    packed = PackedLinear(linear, torch.float32)
    assert torch.equal(linear.weight, before)
    expected = packed(new_rows(3))
    linear.weight.zero_()
    assert torch.equal(packed(new_rows(3)), expected)


class _Quantised(nn.Linear):
    """A layer of another type, as quantisation libraries have."""


class _OddWeight(nn.Parameter):
    """A weight of another type inside a plain layer, as torchao has."""


def test_only_plain_layers_are_swapped() -> None:
    odd = new_linear(True)
    odd.weight = _OddWeight(odd.weight.detach())
    model = nn.ModuleDict(
        {
            "plain": new_linear(True),
            "inner": nn.Sequential(new_linear(False), nn.ReLU()),
            "quantised": _Quantised(67, 45),
            "odd": odd,
            "elsewhere": nn.Linear(67, 45, device="meta"),
        }
    )
    assert pack_linears(model, torch.float32) == 2
    assert isinstance(model["plain"], PackedLinear)
    inner: Any = model["inner"]
    assert isinstance(inner[0], PackedLinear)
    assert type(model["quantised"]) is _Quantised
    assert model["odd"] is odd
    assert type(model["elsewhere"]) is nn.Linear
    assert pack_linears(model, torch.float32) == 0, "what is packed is not packed again"


def test_a_tied_head_is_still_the_embedding() -> None:
    model: Any = build_model("qwen2", 2, seed=4)
    token_ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        expected = model(token_ids).logits
        num_linears = sum(isinstance(module, nn.Linear) for module in model.modules())
        assert pack_linears(model, torch.float32) == num_linears
        assert isinstance(model.get_output_embeddings(), PackedLinear)
        torch.testing.assert_close(model(token_ids).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["_reorder_linear_weight", "_linear_pointwise"])
def test_nothing_is_packed_where_the_operators_are_missing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Missing:
        def __getattr__(self, wanted: str) -> Any:
            if wanted == name:
                raise AttributeError(wanted)
            return getattr(torch.ops.mkldnn, wanted)

    class Ops:
        mkldnn = Missing()

    class FakeTorch:
        ops = Ops()

        def __getattr__(self, wanted: str) -> Any:
            return getattr(torch, wanted)

    monkeypatch.setattr(packed_linear, "torch", FakeTorch())
    model: Any = build_model("llama", 2, seed=4)
    assert pack_linears(model, torch.float32) == 0
    assert type(model.lm_head) is nn.Linear
    # The engine runs all the same, and pads its batches instead.
    prompt = random_prompt(40, seed=1)
    loaded = prepare_model(model, ByteTokenizer(), EngineConfig(device="cpu", dtype="float32"))
    assert loaded.decode_row_multiple == 4
    found = ask(make_engine(model), prompt, max_new_tokens=12, ignore_eos=True)
    expected = greedy_reference(build_model("llama", 2, seed=4), prompt, 12)
    assert list(found.token_ids[0]) == expected


@pytest.mark.parametrize("fault", ["wrong", "dependent", "raises"])
def test_nothing_is_packed_where_packing_gives_something_else(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Faulty(PackedLinear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            product = super().forward(rows)
            if fault == "wrong":
                return product * 1.5
            if fault == "dependent":
                return product * (1 + 1e-6 * (len(rows) % 31 == 0))
            raise RuntimeError("no such kernel on this machine")

    monkeypatch.setattr(packed_linear, "PackedLinear", Faulty)
    model = nn.Sequential(new_linear(True))
    assert pack_linears(model, torch.float32) == 0
    assert type(model[0]) is nn.Linear


def test_an_engine_around_a_packed_model_pads_nothing() -> None:
    model = build_model("llama", 2, seed=4)
    config = EngineConfig(device="cpu", dtype="float32")
    for _ in range(2):  # the second time everything is packed already
        assert prepare_model(model, ByteTokenizer(), config).decode_row_multiple == 1


def test_products_are_computed_with_few_numbers_of_rows_each_at_most_a_quarter_too_many() -> None:
    numbers = [padded_rows(num_rows) for num_rows in range(1, 4_097)]
    assert numbers[:16] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 10, 12, 12, 14, 14, 16, 16]
    assert all(num_rows <= padded for num_rows, padded in enumerate(numbers, start=1))
    assert all(padded < 1.25 * num_rows for num_rows, padded in enumerate(numbers, start=1))
    assert len(set(numbers)) == 44
    assert {128, 512, 1_024, 4_096} <= set(numbers)
