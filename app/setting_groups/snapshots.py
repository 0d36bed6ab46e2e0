"""Settings of the stores that keep snapshots of prompts that were read."""

from typing import Literal

from pydantic import BaseModel, Field


class SnapshotSettings(BaseModel):
    """Where snapshots are kept and when they are used; off until a store is named."""

    snapshot_memory_bytes: int = Field(
        0,
        ge=0,
        le=1 << 50,
        description="Bytes of this machine's memory for snapshots of prompts; 0 keeps none there.",
    )
    snapshot_valkey_url: str | None = Field(
        None,
        min_length=1,
        description="Valkey or Redis that replicas share, such as "
        "`valkeys://user:password@host:6379`; unset uses none.",
    )
    snapshot_valkey_ca_file: str | None = Field(
        None,
        min_length=1,
        description="Certificates, PEM, that sign that server's; unset trusts the system's.",
    )
    snapshot_valkey_cluster: bool = Field(
        False, description="Whether that server runs in cluster mode."
    )
    snapshot_elasticache_name: str | None = Field(
        None,
        min_length=1,
        description="ElastiCache replication group, or serverless cache, to log in to with IAM; "
        "unset takes user and password of the address.",
    )
    snapshot_elasticache_user: str | None = Field(
        None, min_length=1, description="Id of the ElastiCache user for IAM."
    )
    snapshot_elasticache_serverless: bool = Field(
        False, description="Whether that cache is a serverless one."
    )
    snapshot_s3_url: str | None = Field(
        None,
        min_length=1,
        description="`s3://bucket/prefix` for snapshots; unset keeps none there.",
    )
    snapshot_s3_kms_key_id: str | None = Field(
        None,
        min_length=1,
        description="Key of KMS for those objects; unset leaves it to the bucket.",
    )
    snapshot_ttl_s: int = Field(
        86_400,
        ge=1,
        le=366 * 86_400,
        description="Seconds after which snapshots in memory and in Valkey expire; in S3 a "
        "lifecycle rule decides.",
    )
    snapshot_body: Literal["exact", "int8"] = Field(
        "exact",
        description="How snapshots hold keys and values: `int8` halves them, and answers from them "
        "may differ.",
    )
    snapshot_min_prompt_tokens: int = Field(
        256, ge=1, description="Shorter prompts are neither looked up nor stored."
    )
    snapshot_max_bytes: int = Field(
        1024**3,
        ge=1,
        le=1 << 35,
        description="Prompts that keep more bytes of keys and values are neither looked up nor "
        "stored.",
    )
    snapshot_lookup_timeout_ms: int = Field(
        2_000,
        ge=50,
        le=60_000,
        description="Milliseconds that a request waits for a store at most.",
    )
    snapshot_write_bytes_per_s: int = Field(
        200_000_000, ge=1_000, description="Pace of writing snapshots, in the background."
    )

    @property
    def has_snapshots(self) -> bool:
        """Whether any store is named."""
        remote = (self.snapshot_valkey_url, self.snapshot_s3_url)
        return self.snapshot_memory_bytes > 0 or any(remote)
