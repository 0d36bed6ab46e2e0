"""What the event loop tells the engine's thread, and the numbers that come back."""

from dataclasses import dataclass

from snapkv_core.engine.finding import Finding
from snapkv_core.engine.response_stream import ResponseStream
from snapkv_core.events import GenerationRequest
from snapkv_core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Add:
    """Queue a request that was prepared."""

    request: GenerationRequest
    group: tuple[Sequence, ...]
    finding: Finding
    stream: ResponseStream


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request that nobody reads any more."""

    stream: ResponseStream


class Stop:
    """End the thread."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The engine's numbers after its last turn; replaced as a whole, so any thread may read it."""

    num_waiting: int = 0
    num_running: int = 0
    num_pages_used: int = 0
    num_pages_reserved: int = 0
    workspace_bytes: int = 0
