"""What the engine needs to know of a model, in plain numbers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape and limits of a loaded model.

    Attributes:
        name: Name it is served under.
        num_layers: Decoder layers.
        num_q_heads: Query heads per layer.
        num_kv_heads: KV heads per layer.
        head_dim: Elements of one key or value.
        hidden_size: Elements of a hidden state.
        intermediate_size: Elements inside a layer's MLP.
        layer_weights: Parameters of one decoder layer.
        vocab_size: Rows of the output head.
        max_model_len: Tokens that prompt and answer may have together.
        eos_token_ids: Tokens that end an answer.
    """

    name: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    layer_weights: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
