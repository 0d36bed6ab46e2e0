"""How the memory that is free at start is divided, and what reading a prompt takes of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import torch

from snapkv_core.config import EngineConfig
from snapkv_core.errors import ModelLoadError
from snapkv_core.kv_cache.layout import KVLayout
from snapkv_core.models.spec import ModelSpec

#: Not measured on a GPU yet; on a CPU 16 and 64 cost the same and 1 a few per cent more.
DEFAULT_PAGE_SIZE: Final = 64
_FREE_MEMORY_SHARE: Final = {"cpu": 0.4, "cuda": 0.9}
#: Of that, what reading prompts may take at most; the rest are pages.
_MAX_WORKSPACE_SHARE: Final = 0.5
_CGROUP_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclass(frozen=True, slots=True)
class PrefillWorkspace:
    """Arithmetic of the memory that one prompt needs while it is read.

    Attributes:
        spec: The model.
        element_bytes: Bytes of an element of hidden states.
        kv_element_bytes: Bytes of an element of keys and values as attention reads them.
        max_slice_tokens: Most tokens of a slice.
        max_window_size: Most queries that score a prompt.
    """

    spec: ModelSpec
    element_bytes: int
    kv_element_bytes: int
    max_slice_tokens: int
    max_window_size: int

    def bytes_for(self, num_tokens: int) -> int:
        """Return the bytes that reading a prompt of `num_tokens` takes at its worst moment."""
        spec = self.spec
        group_size = spec.num_q_heads // spec.num_kv_heads
        kv_width = spec.num_kv_heads * spec.head_dim
        per_token = (
            (spec.hidden_size + 2 * spec.head_dim) * self.element_bytes  # hidden states, rotation
            + 2 * kv_width * self.kv_element_bytes  # one layer's keys and values
            + 4 * 4 * spec.num_kv_heads  # votes, scores, their order
            + 4 * group_size * min(self.max_window_size, num_tokens) * 2  # logits of one KV head
        )
        per_slice_token = (
            2 * spec.intermediate_size + 4 * spec.hidden_size + 3 * spec.num_q_heads * spec.head_dim
        ) * max(4, self.element_bytes)
        return per_token * num_tokens + per_slice_token * min(self.max_slice_tokens, num_tokens)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What the engine may use.

    Attributes:
        num_pages: Pages of the KV cache's pool.
        workspace_bytes: Bytes for all prompts that are read at once.
    """

    num_pages: int
    workspace_bytes: int


def plan_memory(
    config: EngineConfig, layout: KVLayout, workspace: PrefillWorkspace, device: torch.device
) -> MemoryPlan:
    """Divide what is free once the model is loaded.

    Raises:
        ModelLoadError: Not one sequence of the smallest size would fit.
    """
    spec = workspace.spec
    share = config.kv_memory_fraction or _FREE_MEMORY_SHARE[device.type]
    free_bytes = int(free_memory_bytes(device) * share)
    longest = workspace.bytes_for(spec.max_model_len)
    overtaking = workspace.bytes_for(min(config.overtake_max_tokens, spec.max_model_len))
    workspace_bytes = min(longest + overtaking, int(free_bytes * _MAX_WORKSPACE_SHARE))
    pool_bytes = config.kv_cache_bytes or free_bytes - workspace_bytes
    # More than every place could ever fill is waste.
    most = config.max_num_seqs * layout.num_page_rows * layout.pages_for(spec.max_model_len)
    num_pages = min(pool_bytes // layout.page_bytes, most)
    if num_pages < layout.num_page_rows:
        raise ModelLoadError(
            f"the KV cache's pool of {pool_bytes} bytes has {num_pages} pages of "
            f"{layout.page_bytes} bytes; the shortest sequence needs {layout.num_page_rows}, one "
            "for each layer and KV head. Give it more (kv_cache_bytes) or lower page_size"
        )
    return MemoryPlan(num_pages, workspace_bytes)


def free_memory_bytes(device: torch.device) -> int:
    """Return the bytes that are free on a device; on a CPU within this process's limit as well."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = [
        int(text)
        for path in _CGROUP_LIMITS
        if path.is_file() and (text := path.read_text(encoding="ascii").strip()).isdigit()
    ]
    resident = held_memory_bytes(device)
    return min([int(psutil.virtual_memory().available), *(limit - resident for limit in limits)])


def held_memory_bytes(device: torch.device) -> int:
    """Return the bytes that this process holds on a device; on a CPU its resident memory."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return int(psutil.Process().memory_info().rss)
