"""The same decode step as if its KV lay in one piece: what reading it page by page costs."""

from torch import Tensor

from benchmarks.engine_decode import DecodeFigure, DecodeRun
from benchmarks.figures import Ratio
from snapkv_core import Engine
from snapkv_core.attention.sdpa import SdpaBackend
from snapkv_core.attention.tiled_decode import TiledDecode

#: What the project promises: the whole step, paged over contiguous.
_REQUIRED_COST = 1.15


class ConsecutiveReads(TiledDecode):
    """Reads as many tiles as it is asked for, but such as lie one after another.

    So they are views of the pool, as of a tensor `[sequences, heads, len, dim]`, and nothing is
    gathered. Which tokens they hold is wrong, which changes no time. It walks through the whole
    used part of the pool, so that what is read comes from memory as it would in a step.
    """

    def __init__(self, num_pages: int) -> None:
        """Walk through pages 1 to `num_pages`, all of them written."""
        super().__init__()
        self._end = 1 + num_pages
        self._next = 1

    def gather(self, pages: Tensor, page_ids: Tensor) -> Tensor:
        """Return the next pages instead of those asked for."""
        num_pages = page_ids.numel()
        if self._next + num_pages > self._end:
            self._next = 1
        block = pages[self._next : self._next + num_pages]
        self._next += num_pages
        return self.as_tiles(block, len(page_ids))


class ContiguousRun(DecodeRun):
    """Another run's sequences, timed with consecutive reads; `with` belongs to the other."""

    def __init__(self, engine: Engine, run: DecodeRun) -> None:
        """Borrow the sequences of `run`, which have been read on `engine`."""
        self.batch_size = run.batch_size
        self._engine = engine
        self._run = run

    def time_steps(self, count: int) -> list[float]:
        """See `DecodeRun.time_steps`."""
        backend = self._engine.parts.backend
        assert isinstance(backend, SdpaBackend), "benchmarks run with the sdpa backend"
        paged = backend.decode_kernel
        backend.decode_kernel = ConsecutiveReads(self._engine.parts.manager.num_pages_used)
        try:
            return self._run.time_steps(count)
        finally:
            backend.decode_kernel = paged

    def figure(self, step_s: float) -> DecodeFigure:
        """See `DecodeRun.figure`."""
        return self._run.figure(step_s)


def contiguous_ratio(paged: DecodeFigure, contiguous: DecodeFigure) -> Ratio:
    """Return what pages cost in the whole step."""
    size = f"{paged.batch_size}x{paged.prompt_tokens}"
    return Ratio(
        f"engine/{paged.dtype}/decode step, paged over contiguous, {size}",
        paged.step_ms / contiguous.step_ms,
        "lower",
        _REQUIRED_COST,
    )
