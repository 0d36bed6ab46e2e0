"""Where the X-Ray SDK finds the segment that an AWS call belongs to: in the request's context.

The SDK's own contexts do not do: one lives in a thread, which requests share; one replaces the
event loop's task factory, which on Python 3.11 with uvloop breaks every task; and the one it takes
under Lambda refuses segments.
"""

import functools
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

from aws_xray_sdk.core import patch, xray_recorder
from aws_xray_sdk.core.context import Context
from aws_xray_sdk.core.exceptions.exceptions import AlreadyEndedException
from aws_xray_sdk.core.models.dummy_entities import DummySegment
from aws_xray_sdk.core.models.segment import Segment
from aws_xray_sdk.core.models.subsegment import Subsegment
from aws_xray_sdk.core.sampling.local.sampler import LocalSampler

#: Subsegments of AWS calls a segment may hold before finished ones are sent on their own; a
#: datagram holds 64 KB, and one of them takes some 500 bytes.
MAX_SUBSEGMENTS: Final = 30

#: The request's segment and the subsegments open in it, outermost first. A tuple, since tasks and
#: threads of a request start with a copy of its context and must not share a list.
_entities: ContextVar[tuple[Any, ...]] = ContextVar("snapkv_xray_entities", default=())


class RequestSegment(Segment):  # type: ignore[misc]  # the SDK has no types
    """A segment that knows how it is sent, and is sent once.

    AWS calls that a request started may end after it: whoever ends last sends the segment.
    """

    # The SDK writes everything in an entity's `__dict__` into its document; slots are not in it.
    __slots__ = ("_is_sent", "_lock", "emit")

    def __init__(
        self, name: str, trace_id: str, parent_id: str | None, emit: Callable[[Any], None]
    ) -> None:
        """Open a segment of a trace; `emit` takes its document and those streamed before it."""
        super().__init__(name, traceid=trace_id, parent_id=parent_id)
        self.emit = emit
        self._is_sent = False
        self._lock = threading.Lock()

    def send_when_complete(self) -> None:
        """Send it unless it or a part of it is still open."""
        with self._lock:
            if self._is_sent or not self.ready_to_send():
                return
            self._is_sent = True
        self.emit(self)


class RequestContext(Context):  # type: ignore[misc]  # the SDK has no types
    """Keeps entities in a context variable; without an open segment nothing is recorded."""

    def put_segment(self, segment: Any) -> None:
        """Make `segment` the one of this context."""
        _entities.set((segment,))

    def put_subsegment(self, subsegment: Any) -> None:
        """Open a subsegment in the innermost entity; dropped when there is none."""
        entities = _entities.get()
        if not entities:
            return
        try:
            entities[-1].add_subsegment(subsegment)
        except AlreadyEndedException:  # a call that was started behind the answer
            return
        _entities.set((*entities, subsegment))

    def end_subsegment(self, end_time: float | None = None) -> bool:
        """Close the innermost subsegment; tell whether its segment is still open."""
        entities = _entities.get()
        if not entities or not isinstance(entities[-1], Subsegment) or not entities[-1].in_progress:
            return False
        subsegment = entities[-1]
        _entities.set(entities[:-1])
        subsegment.close(end_time)
        segment = subsegment.parent_segment
        if segment.in_progress:
            return True
        segment.send_when_complete()
        return False

    def get_trace_entity(self) -> Any:
        """Return the innermost open entity, or one that takes everything and is never sent."""
        entities = _entities.get()
        if entities and entities[-1].in_progress:
            return entities[-1]
        # The recorder would warn of None at each AWS call that belongs to no request.
        return DummySegment()

    def set_trace_entity(self, trace_entity: Any) -> None:
        """Make `trace_entity` the innermost one."""
        _entities.set((trace_entity,))

    def clear_trace_entities(self) -> None:
        """Forget the entities of this context."""
        _entities.set(())


class _OwnersEmitter:
    """Sends what the recorder streams where its segment goes: apps may share a process."""

    def send_entity(self, entity: Any) -> None:
        getattr(entity, "parent_segment", entity).emit(entity)


CONTEXT: Final = RequestContext()


@functools.cache
def instrument_botocore() -> None:
    """Record AWS calls in the segments of the requests that make them; for the whole process."""
    # The SDK opens a socket on import, which nothing sends to from here on, and never closes it.
    xray_recorder.emitter._socket.close()
    # What is left out here the recorder chooses by itself, under Lambda differently.
    xray_recorder.configure(
        context=CONTEXT,
        emitter=_OwnersEmitter(),
        # Never asked; the default one starts threads that call the daemon.
        sampler=LocalSampler(),
        streaming_threshold=MAX_SUBSEGMENTS,
    )
    patch(("botocore",))
