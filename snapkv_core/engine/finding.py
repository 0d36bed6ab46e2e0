"""What came of looking for a prompt's snapshot: the message from the cache to the engine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from snapkv_core.events import SnapshotUse
from snapkv_core.kv_cache.snapshot import PromptSnapshot

#: Takes a prompt's snapshot, or None when it was not read to its end. Called on the engine's
#: thread, perhaps again, when only the first call counts; must neither wait nor raise.
TakeSnapshot = Callable[[PromptSnapshot | None], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of looking a prompt up.

    Attributes:
        use: What the request's summary will say.
        snapshot: What reading this prompt gave before, so that it need not be read again.
        on_snapshot: Given what reading the prompt gives, whatever happens; None when nobody
            waits for it.
        is_wanted: Asked on the engine's thread, when the prompt was read, whether it is worth a
            copy; if it is not, None is given.
        lookup_s: Seconds that it took.
    """

    use: SnapshotUse
    snapshot: PromptSnapshot | None = None
    on_snapshot: TakeSnapshot | None = None
    is_wanted: Callable[[], bool] = lambda: True
    lookup_s: float = 0.0

    def give(self, snapshot: PromptSnapshot | None) -> None:
        """Tell whoever waits for it."""
        if self.on_snapshot is not None:
            self.on_snapshot(snapshot)


NOT_LOOKED_UP: Final = Finding("off")
