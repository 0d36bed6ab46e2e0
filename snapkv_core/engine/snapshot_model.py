"""What the snapshot cache has to know of an engine."""

from snapkv_core.engine.engine import Engine
from snapkv_core.engine.snapshot_cache import SnapshotModel
from snapkv_core.kv_cache.snapshot import SnapshotBody, SnapshotIdentity, digest_of
from snapkv_core.sequence import Sequence


def snapshot_model(engine: Engine, fingerprint: str, body: SnapshotBody = "exact") -> SnapshotModel:
    """Describe an engine to a cache.

    Args:
        engine: The engine; its thread may be running.
        fingerprint: Of the weights; snapshots of others are never used.
        body: How K and V are stored; replicas that store otherwise do not meet.
    """
    layout, spec = engine.parts.layout, engine.spec
    # Kinds of device and backends round differently: a token could change with who read the prompt.
    computed_by = f"{fingerprint}/{engine.device.type}/{engine.parts.backend.name}/{body}"
    dtype = str(engine.dtype).removeprefix("torch.")

    def identity_of(leader: Sequence) -> SnapshotIdentity:
        return SnapshotIdentity(
            model_fingerprint=computed_by,
            dtype=dtype,
            compression=leader.compression,
            token_ids_digest=digest_of(leader.prompt_ids),
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            hidden_size=spec.hidden_size,
        )

    def expected_bytes(leader: Sequence) -> int:
        return leader.compression.num_kept(leader.num_prompt_tokens) * layout.token_bytes

    return SnapshotModel(
        identity_of=identity_of,
        expected_bytes=expected_bytes,
        expected_prefill_s=lambda num: engine.parts.pacer.expected_s(num, layout.num_layers),
    )
