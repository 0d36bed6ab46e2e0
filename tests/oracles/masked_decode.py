"""A Llama-like decoder written out by hand, with a mask per layer and KV head after the prompt.

The whole KV stays in place; tokens that SnapKV would drop are hidden from the generated tokens
only. Reads weights from a transformers model and shares no code with it or with `snapkv_core`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

#: Kept prompt tokens of one layer by KV head, and those of all layers.
KeptByHead = Sequence[Sequence[int]]
KeptByLayer = Sequence[KeptByHead]


@dataclass(frozen=True)
class Knobs:
    """The compression of one prompt, in the words of the specification."""

    max_capacity_prompt: int
    window_size: int
    kernel_size: int
    pooling: str


@dataclass
class MaskedDecode:
    """What the oracle found.

    Attributes:
        logits: `[num_generated, vocab]`, row i predicts generated token i.
        kept: Kept prompt tokens by layer and KV head, ascending.
        kept_attention_mass: By layer and KV head.
        smallest_margin: Smallest relative distance between a score at a cut and its nearest
            neighbour of another value; a float32 engine may decide differently below 1e-5.
    """

    logits: Tensor
    kept: list[list[list[int]]] = field(default_factory=list)
    kept_attention_mass: list[list[float]] = field(default_factory=list)
    smallest_margin: float = math.inf


class MaskedDecoder:
    """Weights of a Llama, Mistral or Qwen2 model and their forward pass, step by step."""

    def __init__(self, model: Any, dtype: torch.dtype = torch.float64) -> None:
        config = model.config
        self._weights: dict[str, Tensor] = {
            name: tensor.detach().to(dtype) for name, tensor in model.state_dict().items()
        }
        self._dtype = dtype
        self._eps = config.rms_norm_eps
        self._num_layers = config.num_hidden_layers
        self._num_q_heads = config.num_attention_heads
        self._num_kv_heads = config.num_key_value_heads
        self._head_dim = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        rope = config.rope_parameters
        assert rope["rope_type"] == "default", "the oracle knows plain RoPE only"
        self._theta = float(rope["rope_theta"])

    def run(
        self,
        prompt_ids: Sequence[int],
        generated_ids: Sequence[int],
        *,
        knobs: Knobs | None = None,
        kept: KeptByLayer | None = None,
    ) -> MaskedDecode:
        """Predict every generated token from the prompt and the generated tokens before it.

        Args:
            prompt_ids: The prompt; its tokens see each other in full.
            generated_ids: The tokens to predict, teacher-forced.
            knobs: Choose the kept tokens by these, if the prompt exceeds the capacity.
            kept: Or take these kept tokens as given.

        Returns:
            Logits and, where tokens were dropped, what was kept.
        """
        ids = torch.tensor([*prompt_ids, *generated_ids[:-1]])
        prompt_len = len(prompt_ids)
        result = MaskedDecode(logits=torch.empty(0))
        cos, sin = self._rotation(len(ids))
        hidden = self._weights["model.embed_tokens.weight"][ids]
        for layer in range(self._num_layers):
            normed = self._rms_norm(hidden, f"model.layers.{layer}.input_layernorm.weight")
            queries = self._project(normed, layer, "q_proj", self._num_q_heads)
            keys = self._project(normed, layer, "k_proj", self._num_kv_heads)
            values = self._project(normed, layer, "v_proj", self._num_kv_heads)
            queries, keys = _rotate(queries, cos, sin), _rotate(keys, cos, sin)
            if kept is not None:
                result.kept.append([list(row) for row in kept[layer]])
            elif knobs is not None and prompt_len > knobs.max_capacity_prompt:
                self._choose(queries[:, :prompt_len], keys[:, :prompt_len], knobs, result)
            visible = self._visible(len(ids), prompt_len, result.kept[-1] if result.kept else None)
            attended = self._attend(queries, keys, values, visible)
            hidden = hidden + self._linear(attended, f"model.layers.{layer}.self_attn.o_proj")
            normed = self._rms_norm(hidden, f"model.layers.{layer}.post_attention_layernorm.weight")
            gate = self._linear(normed, f"model.layers.{layer}.mlp.gate_proj")
            up = self._linear(normed, f"model.layers.{layer}.mlp.up_proj")
            gated = gate * (1 / (1 + torch.exp(-gate))) * up
            hidden = hidden + self._linear(gated, f"model.layers.{layer}.mlp.down_proj")
        last = self._rms_norm(hidden[prompt_len - 1 :], "model.norm.weight")
        head = self._weights.get("lm_head.weight", self._weights["model.embed_tokens.weight"])
        result.logits = last @ head.T
        return result

    def _choose(self, queries: Tensor, keys: Tensor, knobs: Knobs, result: MaskedDecode) -> None:
        """Score the prompt with its last queries and note what to keep in this layer."""
        prompt_len = keys.shape[1]
        prefix_len = prompt_len - knobs.window_size
        budget = knobs.max_capacity_prompt - knobs.window_size
        group_size = self._num_q_heads // self._num_kv_heads
        causal = torch.ones(prompt_len, prompt_len, dtype=torch.bool).tril()[prefix_len:]
        kept, mass = [], []
        for kv_head in range(self._num_kv_heads):
            votes = torch.zeros(prefix_len, dtype=self._dtype)
            for member in range(group_size):
                query = queries[kv_head * group_size + member, prefix_len:]
                logits = query @ keys[kv_head].T / math.sqrt(self._head_dim)
                weights = torch.where(causal, logits, -math.inf).softmax(dim=-1)
                votes += weights[:, :prefix_len].sum(dim=0)
            votes /= group_size * knobs.window_size
            half = knobs.kernel_size // 2
            pooled = []
            for centre in range(prefix_len):
                around = votes[max(0, centre - half) : centre + half + 1]
                pooled.append(float(around.max() if knobs.pooling == "max" else around.mean()))
            order = sorted(range(prefix_len), key=lambda i: (-pooled[i], i))
            best = sorted(order[:budget])
            cut = pooled[order[budget - 1]]
            gaps = [abs(score - cut) / cut for score in pooled if score != cut]
            result.smallest_margin = min([result.smallest_margin, *gaps])
            kept.append([*best, *range(prefix_len, prompt_len)])
            mass.append(float(votes[best].sum() / votes.sum()))
        result.kept.append(kept)
        result.kept_attention_mass.append(mass)

    def _visible(self, length: int, prompt_len: int, kept: KeptByHead | None) -> Tensor:
        """Say which key each query may see: `[num_kv_heads, length, length]`, bool."""
        visible = torch.ones(length, length, dtype=torch.bool).tril()
        visible = visible.repeat(self._num_kv_heads, 1, 1)
        if kept is not None:
            for kv_head, tokens in enumerate(kept):
                hidden = sorted(set(range(prompt_len)) - set(tokens))
                visible[kv_head, prompt_len:, hidden] = False
        return visible

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        """Attend head by head; returns `[length, num_q_heads * head_dim]`."""
        group_size = self._num_q_heads // self._num_kv_heads
        heads = []
        for q_head in range(self._num_q_heads):
            kv_head = q_head // group_size
            logits = queries[q_head] @ keys[kv_head].T / math.sqrt(self._head_dim)
            weights = torch.where(visible[kv_head], logits, -math.inf).softmax(dim=-1)
            heads.append(weights @ values[kv_head])
        return torch.cat(heads, dim=-1)

    def _project(self, hidden: Tensor, layer: int, name: str, num_heads: int) -> Tensor:
        flat = self._linear(hidden, f"model.layers.{layer}.self_attn.{name}")
        return flat.reshape(-1, num_heads, self._head_dim).transpose(0, 1)

    def _linear(self, hidden: Tensor, name: str) -> Tensor:
        result: Tensor = hidden @ self._weights[f"{name}.weight"].T
        bias = self._weights.get(f"{name}.bias")
        return result if bias is None else result + bias

    def _rms_norm(self, hidden: Tensor, name: str) -> Tensor:
        mean_square = (hidden * hidden).mean(dim=-1, keepdim=True)
        normed: Tensor = hidden / torch.sqrt(mean_square + self._eps) * self._weights[name]
        return normed

    def _rotation(self, length: int) -> tuple[Tensor, Tensor]:
        # Models define their angles in float32; 64 bits here would be another model at position
        # 1,000, where rounding moves an angle by 1e-5.
        exponents = torch.arange(0, self._head_dim, 2, dtype=torch.int64).float() / self._head_dim
        frequencies = 1.0 / (self._theta**exponents)
        angles = torch.arange(length).float()[:, None] * frequencies[None, :]
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(self._dtype), angles.sin().to(self._dtype)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = heads.shape[-1] // 2
    turned = torch.cat([-heads[..., half:], heads[..., :half]], dim=-1)
    return heads * cos + turned * sin
