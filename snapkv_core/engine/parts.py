"""The parts of an engine, sized for a model, a configuration and the memory that is free."""

from dataclasses import dataclass
from typing import Final

import torch

from snapkv_core.attention.base import AttentionBackend
from snapkv_core.attention.choice import choose_backend
from snapkv_core.config import MAX_WINDOW_SIZE, EngineConfig
from snapkv_core.engine.memory_ledger import MemoryLedger
from snapkv_core.engine.memory_plan import DEFAULT_PAGE_SIZE, PrefillWorkspace, plan_memory
from snapkv_core.engine.model_runner import ModelRunner
from snapkv_core.engine.scheduler import Scheduler
from snapkv_core.engine.slice_pacer import SlicePacer
from snapkv_core.errors import InvalidParameterError, ModelLoadError
from snapkv_core.kv_cache.layout import KVLayout
from snapkv_core.kv_cache.manager import KVCacheManager
from snapkv_core.models.loader import LoadedModel
from snapkv_core.models.spec import ModelSpec

_DECODE_GAP_TARGET_MS: Final = {"cpu": 250, "cuda": 50}
#: A guess that the first slices correct; too low costs a few short slices, too high one long gap.
_INITIAL_FLOPS_PER_S: Final = {"cpu": 2e10, "cuda": 2e13}


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is put together from; each is used by the engine thread only.

    Attributes:
        layout: Shape of the KV cache.
        backend: How attention is computed.
        manager: Where KV lives.
        runner: What runs the model.
        ledger: What memory is promised to whom.
        scheduler: What is run next.
        pacer: What it learns the speed of prefill with.
        max_slice_tokens: Most tokens of a prefill slice: the setting, on the backend's grid.
    """

    layout: KVLayout
    backend: AttentionBackend
    manager: KVCacheManager
    runner: ModelRunner
    ledger: MemoryLedger
    scheduler: Scheduler
    pacer: SlicePacer
    max_slice_tokens: int


def build_parts(model: LoadedModel, config: EngineConfig) -> EngineParts:
    """Build the parts of an engine around a model that is loaded.

    Raises:
        ModelLoadError: There is no memory for a KV cache, or the attention backend cannot run.
    """
    spec = model.spec
    device, dtype = model.decoder.device, model.decoder.dtype
    try:
        backend = choose_backend(config.attention_backend, device, dtype)
    except InvalidParameterError as error:
        raise ModelLoadError(str(error)) from error
    num_cells = max(1, config.prefill_chunk_tokens // backend.grid_tokens)
    max_slice_tokens = num_cells * backend.grid_tokens
    layout = KVLayout(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        element_bytes=dtype.itemsize,
        page_size=config.page_size or DEFAULT_PAGE_SIZE,
    )
    workspace = PrefillWorkspace(
        spec=spec,
        element_bytes=dtype.itemsize,
        kv_element_bytes=4 if device.type == "cpu" else dtype.itemsize,
        max_slice_tokens=max_slice_tokens,
        max_window_size=MAX_WINDOW_SIZE,
    )
    plan = plan_memory(config, layout, workspace, device)
    manager = KVCacheManager(
        layout,
        num_pages=plan.num_pages,
        max_num_seqs=config.max_num_seqs,
        dtype=dtype,
        device=device,
    )
    ledger = MemoryLedger(
        layout,
        num_pages=plan.num_pages,
        workspace_bytes=plan.workspace_bytes,
        workspace_for=workspace.bytes_for,
    )
    pacer = _build_pacer(spec, config, device)
    return EngineParts(
        layout=layout,
        backend=backend,
        manager=manager,
        runner=ModelRunner(model, backend, manager),
        ledger=ledger,
        scheduler=Scheduler(
            num_layers=spec.num_layers,
            grid_tokens=backend.grid_tokens,
            max_slice_tokens=max_slice_tokens,
            max_num_seqs=config.max_num_seqs,
            max_num_waiting=config.max_num_waiting,
            overtake_max_tokens=config.overtake_max_tokens,
            eos_token_ids=spec.eos_token_ids,
            ledger=ledger,
            pacer=pacer,
        ),
        pacer=pacer,
        max_slice_tokens=max_slice_tokens,
    )


def _build_pacer(spec: ModelSpec, config: EngineConfig, device: torch.device) -> SlicePacer:
    target_ms = config.decode_gap_target_ms or _DECODE_GAP_TARGET_MS[device.type]
    return SlicePacer(
        linear_flops_per_token=2.0 * spec.layer_weights,
        # One product for the logits and one for the values, over all query heads.
        attention_flops_per_pair=4.0 * spec.num_q_heads * spec.head_dim,
        target_s=target_ms / 1e3,
        initial_flops_per_s=_INITIAL_FLOPS_PER_S[device.type],
    )
