"""Tiny random language models and tokenizers for tests: seeded, built in memory, a second each.

Of `snapkv_core` it knows the class that vocabularies have, and nothing else.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from llguidance import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from snapkv_core.models.vocabulary import Vocabulary

FAMILIES: Final = ("mistral", "llama", "qwen2")
NUM_Q_HEADS: Final = 6
#: Query groups of one head, of three, and of all heads.
NUM_KV_HEADS: Final = (6, 2, 1)
CONTEXT: Final = 2048

NUM_BYTES: Final = 256
EOS_ID: Final = 256
IM_START_ID: Final = 257
VOCAB_SIZE: Final = 260

_SHARED_CONFIG: Final = {
    "vocab_size": VOCAB_SIZE,
    "intermediate_size": 112,
    "max_position_embeddings": CONTEXT,
    "num_attention_heads": NUM_Q_HEADS,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": None,
}
_CONFIG_CLASSES: Final = {"mistral": MistralConfig, "llama": LlamaConfig, "qwen2": Qwen2Config}
# Hidden sizes that differ from heads times head size show code that mixes the two up.
_FAMILY_CONFIG: Final[dict[str, dict[str, Any]]] = {
    "mistral": {"head_dim": 16, "hidden_size": 64, "sliding_window": None},
    "llama": {"head_dim": 16, "hidden_size": 72, "attention_bias": True},
    "qwen2": {"hidden_size": 96, "tie_word_embeddings": True},
}


def tiny_config(family: str, num_kv_heads: int, **overrides: object) -> PreTrainedConfig:
    """Build the configuration of a tiny model of one family."""
    values: dict[str, Any] = {
        **_SHARED_CONFIG,
        "num_hidden_layers": 4 if family == "llama" else 3,
        "num_key_value_heads": num_kv_heads,
        **_FAMILY_CONFIG[family],
        **overrides,
    }
    config: PreTrainedConfig = _CONFIG_CLASSES[family](**values)
    return config


def build_model(
    family: str, num_kv_heads: int, *, seed: int = 0, **overrides: object
) -> PreTrainedModel:
    """Build a tiny random model in float32, the same one for the same arguments."""
    return randomised(tiny_config(family, num_kv_heads, **overrides), seed=seed)


def randomised(config: PreTrainedConfig, *, seed: int = 0) -> PreTrainedModel:
    """Build a model from a configuration with weights that make attention matter.

    The usual initialisation (0.02) gives attention so flat and logits so small that every wrong
    cache passes a tolerance of 1e-4; here attention logits spread by about two, output logits too.
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 1:
                weight.copy_(noise * 0.3 if name.endswith("bias") else 1.0 + 0.2 * noise)
            elif "embed_tokens" in name:
                # Tied to the head, large embeddings would make every token predict itself.
                weight.copy_(noise * (0.15 if config.tie_word_embeddings else 1.0))
            else:
                gain = 1.5 if any(part in name for part in ("q_proj", "k_proj", "lm_head")) else 1.0
                weight.copy_(noise * gain / weight.shape[1] ** 0.5)
    model.eval()
    return model


def random_prompt(length: int, *, seed: int = 0) -> tuple[int, ...]:
    """Draw the token ids of a prompt."""
    generator = torch.Generator().manual_seed(10_000 + seed)
    return tuple(torch.randint(0, NUM_BYTES, (length,), generator=generator).tolist())


def greedy_reference(model: Any, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """Generate greedily with transformers and its full cache; the end token is not returned."""
    ids = torch.tensor([list(prompt_ids)])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    ids_after: list[int] = output[0, len(prompt_ids) :].tolist()
    return ids_after


class ByteTokenizer:
    """One token per byte and an end token: any text, and characters that span tokens."""

    eos_token_ids: frozenset[int] = frozenset({EOS_ID})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Turn text into its bytes."""
        del add_special_tokens
        return list(text.encode())

    def fewest_tokens(self, text: str) -> int:
        """Leave it to counting."""
        del text
        return 0

    def decode(self, ids: Sequence[int]) -> str:
        """Turn bytes into text; ids beyond the bytes are special and give none."""
        return bytes(i for i in ids if i < NUM_BYTES).decode(errors="replace")

    def vocabulary(self) -> Vocabulary:
        """Return the bytes and the end token."""
        tokens = [*(bytes([byte]) for byte in range(NUM_BYTES)), b"</s>"]
        return vocabulary_of(tokens, EOS_ID)

    @property
    def tool_syntax(self) -> None:
        """Know no tools."""

    def render_chat(self, messages: Sequence[object], tools: Sequence[str] = ()) -> str:
        """Join the messages by a plain template."""
        del tools
        lines = [f"{message.role}: {message.content}\n" for message in messages]  # type: ignore[attr-defined]
        return "".join(lines) + "assistant:"


class _Tokens:
    """Tokens as llguidance asks for them."""

    def __init__(self, tokens: list[bytes], eos_token_id: int) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        self.special_token_ids = [eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        """Find the token of each byte."""
        return [self.tokens.index(bytes([byte])) for byte in text]


def vocabulary_of(tokens: list[bytes], eos_token_id: int) -> Vocabulary:
    """Return a vocabulary of these tokens, of which one ends an answer."""
    return Vocabulary(TokenizerWrapper(_Tokens(tokens, eos_token_id)), {eos_token_id})


@dataclass(frozen=True)
class ScriptedTokenizer:
    """Token 0 is the prompt's, token 1 ends, token 2 + i is the i-th piece of a script."""

    pieces: tuple[bytes, ...]
    eos_token_ids: frozenset[int] = frozenset({1})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Give a prompt token for every character."""
        del add_special_tokens
        return [0] * len(text)

    def fewest_tokens(self, text: str) -> int:
        """Leave it to counting."""
        del text
        return 0

    def decode(self, ids: Sequence[int]) -> str:
        """Join the pieces and read them as UTF-8."""
        joined = b"".join(b"p" if i == 0 else self.pieces[i - 2] for i in ids if i != 1)
        return joined.decode(errors="replace")

    def vocabulary(self) -> Vocabulary:
        """Return the pieces and the two tokens before them."""
        return vocabulary_of([b"p", b"</s>", *self.pieces], 1)

    @property
    def tool_syntax(self) -> None:
        """Know no tools."""

    def render_chat(self, messages: Sequence[object], tools: Sequence[str] = ()) -> str:
        """Give one prompt character per message."""
        del tools
        return "p" * len(messages)


def scripted_model(pieces: Sequence[bytes]) -> tuple[PreTrainedModel, ScriptedTokenizer]:
    """Build a model that answers any prompt with exactly these pieces, then the end token.

    Attention and MLP add nothing, embeddings are one-hot, and the head maps each token to its
    successor, so the text and where its tokens are cut are the test's to choose.
    """
    vocab_size = len(pieces) + 2
    hidden_size = vocab_size + vocab_size % 2  # a multiple of the two heads
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=1,
    )
    model = randomised(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(vocab_size, hidden_size))
        model.model.norm.weight.fill_(1.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for token in range(vocab_size):
            successor = 2 if token == 0 else token + 1
            model.lm_head.weight[1 if successor >= vocab_size else successor, token] = 1.0
    model.eval()
    return model, ScriptedTokenizer(tuple(pieces))


CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model_folder(folder: Path, model: PreTrainedModel) -> Path:
    """Save a model with a byte-level `tokenizer.json` and a chat template, as a hub folder has."""
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken("<|im_end|>", special=True), AddedToken("<|im_start|>", special=True)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
