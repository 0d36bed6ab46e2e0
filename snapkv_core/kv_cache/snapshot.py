"""What reading a prompt leaves behind, and what its reader must agree with; knows no bytes."""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from snapkv_core.config import CompressionConfig
from snapkv_core.errors import SnapshotError
from snapkv_core.validation import require_choice

#: Changes whenever bytes that were written before would be read differently.
SNAPSHOT_FORMAT_VERSION: Final = 1

#: `exact` holds keys and values as they are, `int8` in 8 bits (see `quantised`).
SnapshotBody = Literal["exact", "int8"]
SNAPSHOT_BODIES: Final[tuple[SnapshotBody, ...]] = get_args(SnapshotBody)

#: Number formats a KV cache may have, by the name that identities carry.
KV_DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)

#: Positions are int32.
MAX_PROMPT_TOKENS: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PromptSnapshot:
    """Everything that an engine of the same model needs to go on from a prompt.

    All tensors are on the CPU. `num_entries` of a layer is the sum of its row of `kv_lens`; its
    KV heads lie one after another:

    ```text
    kv_lens[layer] = [3, 2]     keys[layer]   h0 h0 h0 h1 h1     [num_entries, head_dim]
    ```

    Attributes:
        keys: Kept keys of each layer, after RoPE, `[num_entries, head_dim]`, the pool's dtype.
        values: The same for values.
        kv_lens: Tokens kept, `[num_layers, num_kv_heads]`, int32, each at least 1.
        kept_indices: Prompt positions of the kept tokens of each layer, `[num_entries]`, int32,
            ascending within a KV head; None when nothing was dropped.
        last_hidden: The prompt's last token behind the last layer, `[hidden_size]`, the model's
            dtype, which is the pool's. The first token's logits follow from it.
        num_prompt_tokens: Tokens of the prompt.
        kept_attention_mass: As in `CompressionReport`.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    kv_lens: Tensor
    kept_indices: tuple[Tensor, ...] | None
    last_hidden: Tensor
    num_prompt_tokens: int
    kept_attention_mass: float

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))


@dataclass(frozen=True, slots=True)
class SnapshotIdentity:
    """What determines a snapshot; writer and reader must agree on all of it.

    Attributes:
        model_fingerprint: Of the weights and of what computes with them.
        dtype: Of the KV cache: `float32`, `bfloat16` or `float16`.
        compression: Method and knobs.
        token_ids_digest: Of the prompt; see `digest_of`.
        num_layers: Decoder layers.
        num_kv_heads: KV heads per layer.
        head_dim: Elements of one key or value.
        hidden_size: Elements of a hidden state.

    Raises:
        InvalidParameterError: `dtype` is none of these.
    """

    model_fingerprint: str
    dtype: str
    compression: CompressionConfig
    token_ids_digest: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int

    def __post_init__(self) -> None:
        require_choice("dtype", self.dtype, tuple(KV_DTYPES))

    def fields(self) -> dict[str, str | int]:
        """Return all fields by name, those of `compression` as `compression.<name>`."""
        fields = asdict(self)
        knobs = fields.pop("compression")
        return fields | {f"compression.{name}": knob for name, knob in knobs.items()}

    def key(self) -> str:
        """Return the name of the snapshot in a store: 64 hex digits.

        Other fields or another format version give another key.
        """
        named = self.fields() | {"format_version": SNAPSHOT_FORMAT_VERSION}
        return hashlib.sha256(canonical_json(named)).hexdigest()


def digest_of(token_ids: Sequence[int]) -> str:
    """Return the SHA-256 of a prompt's token ids, each as 64 bits, little-endian, in hex."""
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}q", *token_ids)).hexdigest()


def canonical_json(value: object) -> bytes:
    """Return the one way in which `value` is written as JSON here.

    Raises:
        ValueError: It holds a number that is not finite.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), sort_keys=True)
    return text.encode("ascii")


def check_snapshot(snapshot: PromptSnapshot, identity: SnapshotIdentity) -> None:
    """Check that a snapshot is whole, consistent and of the identity's shapes and dtype.

    Raises:
        SnapshotError: It is not; names the first attribute that is wrong.
    """
    dtype = KV_DTYPES[identity.dtype]
    num_tokens, kv_lens = snapshot.num_prompt_tokens, snapshot.kv_lens
    if not 1 <= num_tokens <= MAX_PROMPT_TOKENS:
        raise SnapshotError(f"num_prompt_tokens: must be 1 to {MAX_PROMPT_TOKENS}")
    if not 0.0 <= snapshot.kept_attention_mass < float("inf"):
        raise SnapshotError("kept_attention_mass: must be finite and not negative")
    require_tensor("last_hidden", snapshot.last_hidden, dtype, (identity.hidden_size,))
    require_tensor("kv_lens", kv_lens, torch.int32, (identity.num_layers, identity.num_kv_heads))
    if int(kv_lens.min()) < 1 or int(kv_lens.max()) > num_tokens:
        raise SnapshotError(f"kv_lens: must be 1 to the prompt's {num_tokens} tokens")
    num_entries = kv_lens.sum(dim=1).tolist()
    entry = (identity.head_dim,)
    _require_layers("keys", snapshot.keys, dtype, num_entries, entry)
    _require_layers("values", snapshot.values, dtype, num_entries, entry)
    if snapshot.kept_indices is None:
        if int(kv_lens.min()) < num_tokens:
            raise SnapshotError("kept_indices: missing, although tokens were dropped")
        return
    _require_layers("kept_indices", snapshot.kept_indices, torch.int32, num_entries, ())
    for layer_idx, positions in enumerate(snapshot.kept_indices):
        _require_positions(layer_idx, positions, kv_lens[layer_idx], num_tokens)


def require_tensor(name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """Raise `SnapshotError` unless a tensor has this dtype and shape."""
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
        raise SnapshotError(
            f"{name}: has {tensor.dtype} {list(tensor.shape)}, wanted {dtype} {list(shape)}"
        )


def _require_layers(
    name: str,
    layers: Sequence[Tensor],
    dtype: torch.dtype,
    num_entries: Sequence[int],
    entry: tuple[int, ...],
) -> None:
    if len(layers) != len(num_entries):
        raise SnapshotError(f"{name}: has {len(layers)} layers, wanted {len(num_entries)}")
    for layer_idx, (tensor, num) in enumerate(zip(layers, num_entries, strict=True)):
        require_tensor(f"{name} of layer {layer_idx}", tensor, dtype, (num, *entry))


def _require_positions(
    layer_idx: int, positions: Tensor, kv_lens: Tensor, num_prompt_tokens: int
) -> None:
    """Check a layer's kept positions, `[num_entries]`, of heads with `kv_lens` `[num_kv_heads]`."""
    name = f"kept_indices of layer {layer_idx}"
    if int(positions.min()) < 0 or int(positions.max()) >= num_prompt_tokens:
        raise SnapshotError(f"{name}: a position lies outside the prompt")
    is_rising = positions.diff() > 0
    is_rising[kv_lens[:-1].cumsum(dim=0) - 1] = True  # from one head to the next it may fall
    if not is_rising.all():
        raise SnapshotError(f"{name}: positions of a KV head do not ascend")
