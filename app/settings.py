"""Owns the environment: the only reader of it, and the only writer of core configs from it."""

import difflib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal

from dotenv import dotenv_values
from pydantic import Field, PrivateAttr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from app.setting_groups.access import AccessSettings, is_loopback
from app.setting_groups.aws import AwsSettings
from app.setting_groups.key_limits import KeyLimitSettings
from app.setting_groups.pages import PageSettings
from app.setting_groups.server import SERVICE_LINK, ServerSettings
from app.setting_groups.snapshots import SnapshotSettings
from app.setting_groups.telemetry import TelemetrySettings
from snapkv_core import (
    CompressionConfig,
    EngineConfig,
    InvalidParameterError,
    SnapshotPolicy,
    resolve_compression,
)

ENV_PREFIX: Final = "SNAPKV_"
#: Variables of the test suite, which share a shell with the service's.
TEST_PREFIX: Final = "SNAPKV_TEST_"
#: Key that the command sends to a server. Not the one that OpenAI's clients read, which would go
#: to whatever server is named.
CLIENT_KEY: Final = "SNAPKV_CLIENT_KEY"
ENV_FILE: Final = ".env"
DEMO_MODEL: Final = "demo"

#: The demo model retrieves nothing with a narrow pool at small capacities; see docs/settings.md.
DEMO_COMPRESSION: Final = CompressionConfig(
    max_capacity_prompt=512, window_size=16, kernel_size=15, pooling="max"
)

_ENGINE: Final = EngineConfig()

#: Core field -> settings field, where the names differ.
_RENAMED: Final[Mapping[str, str]] = {"revision": "model_revision"}

#: Fields whose values are in no message; an address may hold a password or a key.
_CONFIDENTIAL: Final = (
    "api_keys",
    "key_limits",
    "otlp_endpoint",
    "snapshot_valkey_url",
    "xray_daemon_address",
)

#: Returns the settings of a secret by field name, or raises `SettingsError`.
ReadSecret = Callable[[str], Mapping[str, object]]


class SettingsError(Exception):
    """The environment or the secret holds what the service cannot start with; names it."""


class Settings(
    AccessSettings,
    KeyLimitSettings,
    AwsSettings,
    PageSettings,
    ServerSettings,
    SnapshotSettings,
    TelemetrySettings,
    BaseSettings,
):
    """Every setting of the service: `SNAPKV_*` variables, a `.env` file, and a secret."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_file=ENV_FILE,
        env_file_encoding="utf-8",
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,
    )

    #: Fields that were not set here but by the secret.
    _secret_fields: frozenset[str] = PrivateAttr(frozenset())

    model: str = Field(
        DEMO_MODEL,
        description="`demo`, a local folder, `s3://bucket/prefix`, or a hub id such as "
        "`mistralai/Mistral-7B-Instruct-v0.2`.",
    )
    model_revision: str | None = Field(
        None, description="Revision of a hub model; unset takes the default branch."
    )
    served_model_name: str | None = Field(
        None, description="Model name in answers, logs and metrics; unset derives it."
    )
    device: str = Field(_ENGINE.device, description="`auto`, `cpu`, `cuda` or `cuda:N`.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        _ENGINE.dtype, description="Number format of weights and KV cache."
    )
    cache_dir: str = Field(
        _ENGINE.cache_dir, description="Folder in which the converted demo model is kept."
    )
    max_model_len: int | None = Field(
        None, description="Tokens prompt and answer may have together; unset takes the model's."
    )
    max_num_seqs: int = Field(_ENGINE.max_num_seqs, description="Sequences held in memory at once.")
    max_num_waiting: int = Field(
        _ENGINE.max_num_waiting,
        description="Requests that may wait beyond those; more are answered with 429, apart from "
        "the first of each key.",
    )
    attention_backend: Literal["auto", "sdpa", "matmul", "flash"] = Field(
        _ENGINE.attention_backend,
        description="How attention is computed; `auto` takes `flash` on a GPU that has flash-attn, "
        "else `sdpa`.",
    )
    page_size: int | None = Field(
        None,
        description="Tokens in a page of the KV cache, a power of two up to 64; unset takes what "
        "suits the device.",
    )
    kv_cache_bytes: int | None = Field(
        None,
        description="Bytes of the KV cache's pool; unset takes a share of the memory that is free.",
    )
    kv_memory_fraction: float | None = Field(
        None,
        description="That share, 0.01 to 1, of the memory that is free once the model is loaded; "
        "unset: 0.9 on a GPU, 0.4 on a CPU.",
    )
    prefill_chunk_tokens: int = Field(
        _ENGINE.prefill_chunk_tokens,
        description="Most prompt tokens that go through a layer in one prefill slice; rounded "
        "down to 512 (sdpa) or 256, but at least that.",
    )
    decode_gap_target_ms: int | None = Field(
        None,
        description="Milliseconds within which running sequences get their next token while a "
        "prompt is read, for which prefill slices are cut; unset: 50 on a GPU, 250 on a CPU.",
    )
    overtake_max_tokens: int = Field(
        _ENGINE.overtake_max_tokens,
        description="Longest prompt in tokens that may be read before a longer one that is being "
        "read; 0 keeps strict order.",
    )
    request_timeout_s: float = Field(
        _ENGINE.request_timeout_s,
        description="Seconds after which a request is ended with 504, finished or not; the header "
        "`X-Request-Timeout` shortens it.",
    )
    default_max_new_tokens: int = Field(
        _ENGINE.default_max_new_tokens,
        description="Answer length in tokens of a request that names none.",
    )
    max_new_tokens_limit: int = Field(
        _ENGINE.max_new_tokens_limit, description="Longest answer a request may ask for."
    )
    num_threads: int | None = Field(
        None, description="CPU threads for the model; unset leaves PyTorch's choice."
    )
    method: str | None = Field(
        None, description="Compression method of a request that names none; unset: `snapkv`."
    )
    max_capacity_prompt: int | None = Field(
        None,
        description="Prompt tokens kept per layer and KV head, the window counted in; "
        "unset: 4096, for the demo model 512.",
    )
    window_size: int | None = Field(
        None,
        description="Last prompt tokens, which score the rest and are always kept; "
        "unset: 32, for the demo model 16.",
    )
    kernel_size: int | None = Field(
        None,
        description="Width of the pooling over scores, odd; unset: 3, for the demo model 15.",
    )
    pooling: str | None = Field(
        None, description="`avg` or `max`; unset: `avg`, for the demo model `max`."
    )

    @field_validator(
        "log_level",
        "dtype",
        "attention_backend",
        "tracing",
        "emf",
        "snapshot_body",
        "auth",
        mode="before",
    )
    @classmethod
    def _lower(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    def to_engine_config(self) -> EngineConfig:
        """Return what the engine is loaded with.

        Raises:
            SettingsError: A value is out of the engine's range; names the variable.
        """
        try:
            return EngineConfig(
                model=self.model,
                revision=self.model_revision,
                device=self.device,
                dtype=self.dtype,
                cache_dir=self.cache_dir,
                served_model_name=self.served_model_name,
                max_model_len=self.max_model_len,
                max_num_seqs=self.max_num_seqs,
                max_num_waiting=self.max_num_waiting,
                attention_backend=self.attention_backend,
                page_size=self.page_size,
                kv_cache_bytes=self.kv_cache_bytes,
                kv_memory_fraction=self.kv_memory_fraction,
                prefill_chunk_tokens=self.prefill_chunk_tokens,
                decode_gap_target_ms=self.decode_gap_target_ms,
                overtake_max_tokens=self.overtake_max_tokens,
                request_timeout_s=self.request_timeout_s,
                default_max_new_tokens=self.default_max_new_tokens,
                max_new_tokens_limit=self.max_new_tokens_limit,
                num_threads=self.num_threads,
            )
        except InvalidParameterError as error:
            raise self._named(error) from error

    def default_compression(self) -> CompressionConfig:
        """Return how prompts are compressed when the request names nothing.

        Raises:
            SettingsError: A value or a combination is out of range; names the variable.
        """
        base = DEMO_COMPRESSION if self.model == DEMO_MODEL else CompressionConfig()
        try:
            return resolve_compression(
                base,
                None,
                {
                    "method": self.method,
                    "max_capacity_prompt": self.max_capacity_prompt,
                    "window_size": self.window_size,
                    "kernel_size": self.kernel_size,
                    "pooling": self.pooling,
                },
            )
        except InvalidParameterError as error:
            raise self._named(error) from error

    def snapshot_policy(self) -> SnapshotPolicy:
        """Return when snapshots of prompts are used."""
        return SnapshotPolicy(
            body=self.snapshot_body,
            min_prompt_tokens=self.snapshot_min_prompt_tokens,
            max_snapshot_bytes=self.snapshot_max_bytes,
            lookup_timeout_s=self.snapshot_lookup_timeout_ms / 1e3,
            max_write_bytes_per_s=self.snapshot_write_bytes_per_s,
        )

    def require_access_control(self) -> None:
        """Refuse to serve strangers.

        Raises:
            SettingsError: Nobody would be asked for a key where other machines can connect, or
                there are no keys to ask for.
        """
        if self.auth == "keys" and not self.api_keys:
            raise SettingsError(f"{env_name('auth')}: is keys, and {env_name('api_keys')} has none")
        if not self.keys_in_force and not is_loopback(self.host):
            raise SettingsError(
                f"{env_name('host')}: {self.host} can be reached from other machines, and nobody "
                f"would be asked for a key; set {env_name('api_keys')}, or listen on 127.0.0.1"
            )

    def require_usable_limits(self) -> None:
        """Check that the limits of callers go together with everything else.

        Raises:
            SettingsError: They do not; names the variable or the secret.
        """
        window_size = self.default_compression().window_size
        if (problem := self.limits_problem(self.api_keys, window_size)) is not None:
            source = f"secret {self.secret_id}: key_limits"
            is_secret = "key_limits" in self._secret_fields
            raise SettingsError(f"{source if is_secret else env_name('key_limits')}: {problem}")

    def with_secret(self, values: Mapping[str, object]) -> "Settings":
        """Return settings that take from `values` what is set by nothing nearer.

        Args:
            values: Checked values by field name.
        """
        absent = {
            name: value for name, value in values.items() if name not in self.model_fields_set
        }
        settings = self.model_copy(update=absent)
        settings._secret_fields = frozenset(absent)
        return settings

    def _named(self, error: InvalidParameterError) -> SettingsError:
        field = _RENAMED.get(error.field, error.field)
        named = set(re.findall(r"\w+", f"{field} {error.reason}"))
        if named & self._secret_fields:
            # The core's reasons end in the value, and nothing of a secret is shown.
            reason = error.reason.partition(", got ")[0]
            return SettingsError(f"secret {self.secret_id}: {field}: {reason}")
        return SettingsError(f"{env_name(field)}: {error.reason}")


def load_settings(
    overrides: Mapping[str, object] | None = None,
    *,
    env_file: str | Path | None = ENV_FILE,
    read_secret: ReadSecret | None = None,
) -> Settings:
    """Read the settings and check them as a whole.

    Args:
        overrides: Values by field name that win over the environment; None counts as absent.
        env_file: File of `NAME=value` lines that the environment wins over; None reads none.
        read_secret: Reads the secret that `secret_id` names, for what is set nowhere else; None
            reads none.

    Returns:
        Settings from which both core configs can be built.

    Raises:
        SettingsError: A variable is misspelled, a value is not acceptable, or the secret cannot
            be read. The message is one line and names the variable or the secret.
    """
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    _reject_misspelled(env_file)
    try:
        settings = Settings(_env_file=env_file, **given)  # type: ignore[arg-type]
    except ValidationError as error:
        raise SettingsError("; ".join(_problems(error))) from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{env_file}: is not UTF-8 text") from error
    if read_secret is not None and settings.secret_id is not None:
        settings = settings.with_secret(read_secret(settings.secret_id))
    settings.to_engine_config()
    settings.default_compression()
    settings.require_usable_limits()
    return settings


def env_name(field: str) -> str:
    """Return the environment variable that sets a field of `Settings`."""
    return f"{ENV_PREFIX}{field.upper()}"


def _problems(error: ValidationError) -> list[str]:
    problems = []
    for detail in error.errors(include_url=False):
        name = env_name(str(detail["loc"][0])) if detail["loc"] else ENV_FILE
        reason = detail["msg"].removeprefix("Value error, ").replace("Input should", "must")
        is_confidential = bool(detail["loc"]) and detail["loc"][0] in _CONFIDENTIAL
        shown = "" if is_confidential else f", got {str(detail['input'])[:80]!r}"
        problems.append(f"{name}: {reason}{shown}")
    return problems


def _reject_misspelled(env_file: str | Path | None) -> None:
    known = {env_name(field) for field in Settings.model_fields}
    names = set(os.environ)
    if env_file is not None and Path(env_file).is_file():
        try:
            names |= set(dotenv_values(env_file, encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise SettingsError(f"{env_file}: is not UTF-8 text") from error
    for name in sorted(names):
        upper = name.upper()
        if not upper.startswith(ENV_PREFIX) or upper in known or _is_not_ours(name):
            continue
        close = difflib.get_close_matches(upper, known, n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise SettingsError(f"{name}: is no setting of this service{hint}")


def _is_not_ours(name: str) -> bool:
    value = os.environ.get(name, "")
    is_link = SERVICE_LINK.fullmatch(name) or value.startswith(("tcp://", "udp://"))
    return bool(is_link) or name.upper().startswith(TEST_PREFIX) or name.upper() == CLIENT_KEY
