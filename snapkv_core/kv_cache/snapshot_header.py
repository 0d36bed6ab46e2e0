"""The JSON at the head of a snapshot's bytes: what was read, how, and how much of it was kept."""

import json
from dataclasses import dataclass
from typing import Any, Final

from snapkv_core.errors import SnapshotError
from snapkv_core.kv_cache.snapshot import (
    MAX_PROMPT_TOKENS,
    SNAPSHOT_BODIES,
    PromptSnapshot,
    SnapshotBody,
    SnapshotIdentity,
    canonical_json,
)

_NAMES: Final = frozenset(
    {
        "body",
        "has_kept_indices",
        "identity",
        "kept_attention_mass",
        "kv_lens",
        "num_prompt_tokens",
    }
)


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """What a reader must know before the body.

    Attributes:
        body: How keys and values are held.
        has_kept_indices: Whether positions of kept tokens follow.
        kept_attention_mass: As in `PromptSnapshot`.
        kv_lens: As in `PromptSnapshot`, by layer and KV head.
        num_prompt_tokens: As in `PromptSnapshot`.
    """

    body: SnapshotBody
    has_kept_indices: bool
    kept_attention_mass: float
    kv_lens: list[list[int]]
    num_prompt_tokens: int


def write_header(snapshot: PromptSnapshot, identity: SnapshotIdentity, body: SnapshotBody) -> bytes:
    """Return the header as canonical JSON."""
    return canonical_json(
        {
            "body": body,
            "has_kept_indices": snapshot.kept_indices is not None,
            "identity": identity.fields(),
            "kept_attention_mass": float(snapshot.kept_attention_mass),
            "kv_lens": snapshot.kv_lens.tolist(),
            "num_prompt_tokens": snapshot.num_prompt_tokens,
        }
    )


def read_header(written: bytes, identity: SnapshotIdentity) -> SnapshotHeader:
    """Read a header and hold it against what is wanted.

    Raises:
        SnapshotError: It is not what `write_header` gives for this identity; names what differs.
    """
    found = _parse(written)
    _require_identity(found["identity"], identity)
    body, num_tokens = found["body"], found["num_prompt_tokens"]
    if body not in SNAPSHOT_BODIES:
        raise SnapshotError(f"body: must be one of {', '.join(SNAPSHOT_BODIES)}")
    # A bool is an int and equals one, so types are compared, not asked for.
    if type(num_tokens) is not int or not 1 <= num_tokens <= MAX_PROMPT_TOKENS:
        raise SnapshotError(f"num_prompt_tokens: must be 1 to {MAX_PROMPT_TOKENS}")
    if type(found["has_kept_indices"]) is not bool:
        raise SnapshotError("has_kept_indices: must be true or false")
    if type(found["kept_attention_mass"]) is not float:
        raise SnapshotError("kept_attention_mass: must be a number with a point")
    _require_kv_lens(found["kv_lens"], identity, num_tokens)
    return SnapshotHeader(**{name: found[name] for name in _NAMES - {"identity"}})


def _parse(written: bytes) -> dict[str, Any]:
    """Return the members of a header, all of them there, of any type."""
    try:
        found = json.loads(written)
        is_canonical = canonical_json(found) == written
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"header: not JSON as it is written here: {error!s:.80}") from error
    # One text for one meaning: no member twice, none in another spelling.
    if not is_canonical:
        raise SnapshotError("header: not JSON as it is written here")
    if not isinstance(found, dict) or found.keys() != _NAMES:
        raise SnapshotError(f"header: its members are not {', '.join(sorted(_NAMES))}")
    return found


def _require_identity(found: object, identity: SnapshotIdentity) -> None:
    wanted = identity.fields()
    if not isinstance(found, dict) or found.keys() != wanted.keys():
        raise SnapshotError(f"identity: its members are not {', '.join(sorted(wanted))}")
    for name, value in wanted.items():
        if type(found[name]) is not type(value) or found[name] != value:
            raise SnapshotError(f"{name}: has {_shown(found[name])}, wanted {_shown(value)}")


def _require_kv_lens(found: object, identity: SnapshotIdentity, num_prompt_tokens: int) -> None:
    """Check the lengths as numbers, before they become a tensor that cannot hold every number."""
    if not (
        isinstance(found, list)
        and len(found) == identity.num_layers
        and all(isinstance(row, list) and len(row) == identity.num_kv_heads for row in found)
    ):
        raise SnapshotError(
            f"kv_lens: must be {identity.num_layers} rows of {identity.num_kv_heads} numbers"
        )
    if not all(type(n) is int and 1 <= n <= num_prompt_tokens for row in found for n in row):
        raise SnapshotError(f"kv_lens: must be 1 to the prompt's {num_prompt_tokens} tokens")


def _shown(value: object) -> str:
    return f"{value!r:.80}" if isinstance(value, str | int) else type(value).__name__
