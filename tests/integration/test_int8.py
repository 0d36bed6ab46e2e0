"""A model with int8 weights runs through the same engine and answers as transformers runs it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torchao.quantization import Int8Tensor, Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, TorchAoConfig

from snapkv_core import CompressionConfig, Engine, EngineConfig
from snapkv_core.models.packed_linear import PackedLinear
from tests.support.engines import FULL, ask, make_engine, make_request, run_together
from tests.support.models import (
    build_model,
    greedy_reference,
    random_prompt,
    write_model_folder,
)
from tests.support.recording import differing_answers, record_logits

_PROMPT = random_prompt(150, seed=3)
_SMALL = CompressionConfig(max_capacity_prompt=24, window_size=8, kernel_size=3)


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny model in float32."""
    return write_model_folder(tmp_path_factory.mktemp("plain"), build_model("llama", 2, seed=5))


def quantised(folder: Path) -> Any:
    """Load a saved model with its linear layers, but for the head, in int8."""
    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        device_map={"": torch.device("cpu")},
        quantization_config=TorchAoConfig(Int8WeightOnlyConfig()),
    )


@pytest.fixture(scope="module")
def int8_folder(plain_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the quantised model, as a hub folder with int8 weights is."""
    return write_model_folder(tmp_path_factory.mktemp("int8"), quantised(plain_folder))


@torch.no_grad()
def own_logits(model: Any, output_ids: list[int]) -> torch.Tensor:
    """Return what a transformers model predicts each token of an answer with."""
    logits: torch.Tensor = model(torch.tensor([[*_PROMPT, *output_ids[:-1]]])).logits
    return logits[0, len(_PROMPT) - 1 :]


def test_int8_weights_stay_int8_and_answer_as_transformers_does(plain_folder: Path) -> None:
    reference = quantised(plain_folder)
    expected = greedy_reference(reference, _PROMPT, 40)
    model = quantised(plain_folder)
    engine = make_engine(model)
    projection = model.model.layers[0].self_attn.q_proj
    assert isinstance(projection.weight, Int8Tensor), "packing would make it float32 again"
    assert isinstance(model.lm_head, PackedLinear), "the head is not quantised, so it is packed"
    found = ask(engine, _PROMPT, FULL, max_new_tokens=40, ignore_eos=True)
    assert list(found.token_ids[0]) == expected
    logits = own_logits(reference, expected)
    assert (engine.score(_PROMPT, tuple(expected), FULL) - logits).abs().max() < 1e-4
    unquantised = own_logits(build_model("llama", 2, seed=5), expected)
    assert (unquantised - logits).abs().max() > 0.05, "quantising must matter here"


def test_a_folder_with_int8_weights_is_loaded_as_it_is(
    plain_folder: Path, int8_folder: Path
) -> None:
    expected = greedy_reference(quantised(plain_folder), _PROMPT, 40)
    engine = Engine.load(EngineConfig(model=str(int8_folder), device="cpu", dtype="float32"))
    found = ask(engine, _PROMPT, FULL, max_new_tokens=40, ignore_eos=True)
    assert list(found.token_ids[0]) == expected


def test_int8_logits_do_not_depend_on_the_company(
    plain_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(quantised(plain_folder), max_num_seqs=16)
    recorded = record_logits(engine, monkeypatch)
    requests = [
        make_request(
            random_prompt(20 + 17 * seed, seed=seed),
            _SMALL,
            max_new_tokens=3 + 4 * seed,
            ignore_eos=True,
        )
        for seed in range(11)
    ]
    for request in requests:
        engine.generate(request)
    alone = dict(recorded)
    recorded.clear()
    run_together(engine, requests)
    assert differing_answers(recorded, alone) == {}
