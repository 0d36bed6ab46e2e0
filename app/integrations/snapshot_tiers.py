"""Opens the stores of snapshots that the settings name, nearest first, as one."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from app.integrations.aws.snapshot_store import S3StoreConfig, open_s3_store
from app.integrations.aws.weights.location import S3Location
from app.integrations.valkey.config import ElastiCacheLogin, ValkeyConfig
from app.integrations.valkey.store import open_valkey_store
from app.settings import Settings, SettingsError, env_name
from snapkv_core import (
    GuardedStore,
    InvalidParameterError,
    KVStore,
    MemoryStore,
    OnStoreError,
    StoreError,
    TieredStore,
)

#: Header, kept positions and padding of a snapshot come on top of its keys and values.
_OVERHEAD_BYTES: Final = 64 << 20
_SHARE_OF_LOOKUP: Final = 0.8
#: Copies from a store to a nearer one.
_NUM_COPIERS: Final = 2

#: Fields of `ValkeyConfig` and the settings they come from, where a message is to name one.
_VALKEY_SETTINGS: Final = {
    "ca_file": "snapshot_valkey_ca_file",
    "elasticache": "snapshot_elasticache_name",
    "ttl_s": "snapshot_ttl_s",
}


def open_snapshot_tiers(settings: Settings, on_error: OnStoreError) -> KVStore | None:
    """Return the stores that the settings name, as one; connects to nothing.

    Each store over a network is left alone for a while after some failures in a row, whatever the
    others do.

    Args:
        settings: The settings.
        on_error: Told of each failure of a store, on any thread.

    Returns:
        The store; None when the settings name none.

    Raises:
        SettingsError: They do not go together, or are not acceptable; names the variable.
    """
    _require_together(settings)
    if not settings.has_snapshots:
        return None
    tiers: list[KVStore] = []
    if settings.snapshot_memory_bytes:
        tiers.append(MemoryStore(settings.snapshot_memory_bytes, max_age_s=settings.snapshot_ttl_s))
    remote: list[Callable[[Settings, float], KVStore]] = []
    if settings.snapshot_valkey_url is not None:
        remote.append(_open_valkey)
    if settings.snapshot_s3_url is not None:
        remote.append(_open_s3)
    # So that all of them together have answered before a request gives up, which would count
    # against the nearest as well.
    timeout_s = _SHARE_OF_LOOKUP * settings.snapshot_lookup_timeout_ms / 1e3 / max(1, len(remote))
    tiers += [GuardedStore(open_tier(settings, timeout_s)) for open_tier in remote]
    executor = ThreadPoolExecutor(_NUM_COPIERS, thread_name_prefix="snapshot-copier")
    return TieredStore(tiers, executor=executor, on_error=on_error)


def _open_valkey(settings: Settings, get_timeout_s: float) -> KVStore:
    assert settings.snapshot_valkey_url is not None, "looked at before"
    ca_file, login = settings.snapshot_valkey_ca_file, None
    if settings.snapshot_elasticache_name is not None:
        assert settings.snapshot_elasticache_user is not None, "required together"
        login = ElastiCacheLogin(
            cache_name=settings.snapshot_elasticache_name,
            user_id=settings.snapshot_elasticache_user,
            is_serverless=settings.snapshot_elasticache_serverless,
        )
    try:
        config = ValkeyConfig.from_url(
            settings.snapshot_valkey_url,
            is_cluster=settings.snapshot_valkey_cluster,
            ca_file=None if ca_file is None else Path(ca_file),
            elasticache=login,
            ttl_s=settings.snapshot_ttl_s,
            max_blob_bytes=settings.snapshot_max_bytes + _OVERHEAD_BYTES,
            get_timeout_s=get_timeout_s,
        )
        return open_valkey_store(config)
    except InvalidParameterError as error:
        field = _VALKEY_SETTINGS.get(error.field, "snapshot_valkey_url")
        raise SettingsError(f"{env_name(field)}: {error.reason}") from error
    except StoreError as error:
        raise SettingsError(f"{env_name('snapshot_elasticache_name')}: {error.reason}") from error


def _open_s3(settings: Settings, get_timeout_s: float) -> KVStore:
    assert settings.snapshot_s3_url is not None, "looked at before"
    try:
        config = S3StoreConfig(
            location=S3Location.parse(settings.snapshot_s3_url),
            kms_key_id=settings.snapshot_s3_kms_key_id,
            max_blob_bytes=settings.snapshot_max_bytes + _OVERHEAD_BYTES,
            get_timeout_s=get_timeout_s,
        )
        return open_s3_store(config)
    except (InvalidParameterError, StoreError) as error:
        raise SettingsError(f"{env_name('snapshot_s3_url')}: {error.reason}") from error


def _require_together(settings: Settings) -> None:
    """Refuse settings that would do nothing, since somebody expects them to do something."""
    for field, needed in (
        ("snapshot_valkey_ca_file", "snapshot_valkey_url"),
        ("snapshot_valkey_cluster", "snapshot_valkey_url"),
        ("snapshot_elasticache_name", "snapshot_valkey_url"),
        ("snapshot_elasticache_name", "snapshot_elasticache_user"),
        ("snapshot_elasticache_user", "snapshot_elasticache_name"),
        ("snapshot_elasticache_serverless", "snapshot_elasticache_name"),
        ("snapshot_s3_kms_key_id", "snapshot_s3_url"),
    ):
        if getattr(settings, field) and not getattr(settings, needed):
            raise SettingsError(f"{env_name(field)}: needs {env_name(needed)} as well")
