"""A folder loads and answers; a model that would be served wrongly is refused with the reason."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from snapkv_core import (
    ChatMessage,
    CompressionConfig,
    Engine,
    EngineConfig,
    InvalidParameterError,
    ModelLoadError,
)
from tests.support.engines import ask, make_engine
from tests.support.models import (
    CONTEXT,
    VOCAB_SIZE,
    build_model,
    greedy_reference,
    random_prompt,
    randomised,
    write_model_folder,
)

_COMPRESSION = CompressionConfig(max_capacity_prompt=24, window_size=8, kernel_size=3)
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": None,
}


def load(folder: Path | str, **settings: Any) -> Engine:
    """Load a model as the service does, in float32 on the CPU."""
    return Engine.load(EngineConfig(model=str(folder), device="cpu", dtype="float32", **settings))


def refusal(config: PreTrainedConfig, **settings: Any) -> str:
    """Return why a model of this configuration is refused."""
    with pytest.raises(ModelLoadError) as refused:
        make_engine(randomised(config), **settings)
    return str(refused.value)


def test_a_folder_is_loaded_with_its_tokenizer_and_answers_like_transformers(
    tmp_path: Path,
) -> None:
    folder = write_model_folder(tmp_path / "tiny", build_model("llama", 2, seed=41))
    engine = load(folder)
    assert engine.spec.name == "tiny"
    assert engine.spec.max_model_len == CONTEXT
    assert engine.spec.num_kv_heads == 2
    assert engine.kv_bytes == 0
    prompt = random_prompt(70, seed=1)
    found = ask(engine, prompt, max_new_tokens=24, ignore_eos=True)
    assert list(found.token_ids[0]) == greedy_reference(
        build_model("llama", 2, seed=41), prompt, 24
    )
    text = "naïve 日本語 🎉\n<|im_end|>"
    ids = engine.tokenizer.encode(text)
    assert len(ids) == len(text.encode()) - len("<|im_end|>") + 1
    assert ids[-1] in engine.spec.eos_token_ids
    assert engine.tokenizer.decode(ids) == text.removesuffix("<|im_end|>")


def test_messages_go_through_the_folders_chat_template(tmp_path: Path) -> None:
    engine = load(write_model_folder(tmp_path / "tiny", build_model("mistral", 2, seed=41)))
    messages = (ChatMessage("user", "hi"),)
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert engine.tokenizer.render_chat(messages) == rendered
    by_messages = ask(engine, messages, _COMPRESSION, max_new_tokens=8, ignore_eos=True)
    by_text = ask(engine, rendered, _COMPRESSION, max_new_tokens=8, ignore_eos=True)
    assert by_messages.token_ids == by_text.token_ids
    with pytest.raises(InvalidParameterError, match=r"messages|prompt"):
        ask(engine, (), _COMPRESSION, max_new_tokens=8)


@pytest.mark.parametrize(
    "model", ["/no/such/folder", "./nowhere", "no-such-model", "~/no/such/folder", "a/b/c"]
)
def test_a_missing_folder_is_refused_by_name(model: str) -> None:
    with pytest.raises(ModelLoadError) as refused:
        load(model)
    assert model in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load(tmp_path)


def test_a_folder_with_a_damaged_file_is_refused(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "tiny", build_model("mistral", 2))
    (folder / "config.json").write_text("{ not json")
    with pytest.raises(ModelLoadError):
        load(folder)


def test_a_folder_with_half_its_weights_is_refused(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "tiny", build_model("mistral", 2))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5_000])
    with pytest.raises(ModelLoadError):
        load(folder)


def test_a_folder_without_its_weights_is_refused(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "tiny", build_model("mistral", 2))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError):
        load(folder)


def test_weights_that_lack_a_tensor_are_refused(tmp_path: Path) -> None:
    # transformers fills the gap with random numbers and only warns.
    folder = write_model_folder(tmp_path / "tiny", build_model("mistral", 2))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="up_proj"):
        load(folder)


def test_an_active_sliding_window_is_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    model = build_model("mistral", 2, sliding_window=512)
    folder = write_model_folder(tmp_path / "tiny", model)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"sliding window of 512.*2048"):
        load(folder)


def test_a_sliding_window_that_the_context_never_reaches_is_served() -> None:
    model = build_model("mistral", 2, seed=3, sliding_window=512)
    engine = make_engine(model, max_model_len=512)
    prompt = random_prompt(300, seed=3)
    expected = greedy_reference(build_model("mistral", 2, seed=3, sliding_window=512), prompt, 16)
    found = ask(engine, prompt, max_new_tokens=16, ignore_eos=True)
    assert list(found.token_ids[0]) == expected


def test_a_sliding_window_in_some_layers_is_refused() -> None:
    config = Qwen2Config(**_SHAPE, use_sliding_window=True, sliding_window=64, max_window_layers=1)
    assert "sliding window" in refusal(config)
    # Named in the file but switched off, as all Qwen2 models have it.
    off = Qwen2Config(**_SHAPE, use_sliding_window=False, sliding_window=64)
    assert ask(make_engine(randomised(off)), "hello", _COMPRESSION, max_new_tokens=2).texts


def test_a_family_that_caps_its_logits_is_refused() -> None:
    # Gemma2: softcap on attention and head, scaled embeddings; its window is out of the way.
    config = Gemma2Config(**_SHAPE, head_dim=16, sliding_window=CONTEXT)
    message = refusal(config)
    assert "Gemma2" in message
    assert "\n" not in message


@pytest.mark.parametrize("field", ["embedding_multiplier", "logits_scaling"])
def test_a_scale_outside_the_layers_is_refused(field: str) -> None:
    scale: dict[str, Any] = {field: 3.0}
    assert "Granite" in refusal(GraniteConfig(**_SHAPE, **scale))


def test_scales_inside_the_layers_are_served_exactly() -> None:
    def build() -> PreTrainedModel:
        return randomised(
            GraniteConfig(**_SHAPE, attention_multiplier=0.4, residual_multiplier=0.7), seed=4
        )

    prompt = random_prompt(90, seed=4)
    found = ask(make_engine(build()), prompt, max_new_tokens=16, ignore_eos=True)
    assert list(found.token_ids[0]) == greedy_reference(build(), prompt, 16)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_longest_position_is_refused(rope_type: str) -> None:
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 10_000.0, "factor": 2.0}
    if rope_type == "longrope":
        rope |= {
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 1024,
        }
    message = refusal(LlamaConfig(**_SHAPE, rope_parameters=rope))
    assert "RoPE" in message
    assert rope_type in message


def test_rope_that_is_scaled_once_and_for_all_is_served() -> None:
    rope = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    config = LlamaConfig(**_SHAPE, rope_parameters=rope)
    prompt = random_prompt(90, seed=4)
    found = ask(make_engine(randomised(config)), prompt, max_new_tokens=16, ignore_eos=True)
    expected = greedy_reference(randomised(config), prompt, 16)
    assert list(found.token_ids[0]) == expected


def test_a_model_of_another_make_is_refused() -> None:
    config = GPT2Config(vocab_size=VOCAB_SIZE, n_embd=48, n_layer=2, n_head=3)
    assert "GPT2" in refusal(config)


def test_a_longer_context_than_the_models_is_refused() -> None:
    model = build_model("mistral", 2)
    with pytest.raises(ModelLoadError, match=rf"{CONTEXT + 1}.*{CONTEXT}"):
        make_engine(model, max_model_len=CONTEXT + 1)


def test_the_callers_model_still_works_on_its_own() -> None:
    model = build_model("llama", 2, seed=6)
    prompt = random_prompt(80, seed=6)
    before = greedy_reference(model, prompt, 16)
    engine = make_engine(model)
    ask(engine, prompt, _COMPRESSION, max_new_tokens=16)
    assert greedy_reference(model, prompt, 16) == before
    with torch.no_grad():
        logits = model(torch.tensor([list(prompt)])).logits
    assert torch.isfinite(logits).all()
