"""Whose prompt is read next and in which slices; it knows no page, no byte and no clock."""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile, zip_longest
from typing import Final

from snapkv_core.engine.slice_pacer import SlicePacer
from snapkv_core.engine.step_plan import PrefillSlice
from snapkv_core.sequence import Sequence, SequenceStatus

#: How often later requests may be started before one that waits.
MAX_TIMES_PASSED: Final = 8


def _unfinished(group: tuple[Sequence, ...]) -> tuple[Sequence, ...]:
    return tuple(choice for choice in group if choice.status is not SequenceStatus.FINISHED)


@dataclass(slots=True, eq=False)
class _WaitingGroup:
    """A request that has not been started.

    Attributes:
        members: Its choices that have not been dropped.
        num_times_passed: How many requests behind it were started before it.
    """

    members: tuple[Sequence, ...]
    num_times_passed: int = 0


@dataclass(slots=True)
class _Reading:
    """A prompt being read and how far it is.

    Attributes:
        leader: The choice that reads for all of them.
        members: The choices that have not been dropped.
        layer_idx: Layer of the next slice.
        token_offset: First token of the next slice.
        owed_flops: Work that an overtaker was given and this prompt has not been given since.
    """

    leader: Sequence
    members: tuple[Sequence, ...]
    layer_idx: int = 0
    token_offset: int = 0
    owed_flops: float = 0.0


class PrefillQueue:
    """Tenants take turns, and a short prompt may overtake a long one that is being read.

    The queue. Requests of one tenant are in the order of their arrival. Those of several stand in
    rounds: the first of each tenant, then the second of each, and so on; in each round the tenant
    comes first whose last start, or whose arrival in the queue where that is later, is longest
    ago. So a tenant that waits is passed once by each other tenant, however many requests they
    have there, and by those that may overtake.

    Overtaking. While a prompt is being read, the first request in the queue may be started and read
    before it whose prompt has at most `overtake_max_tokens` tokens, costs less work than the
    prompt being read still does, and for which there is room. It may pass requests in the queue
    that are ahead of it. Two bounds keep everyone moving:

    - Credit: at most one prompt overtakes at a time, and the next one only after the overtaken
      prompt was given as much work as the last overtaker. All overtakers of a prompt together
      thus cost less than the prompt itself, so its reading takes less than twice as long.
    - Patience: nobody in the queue is passed more than `MAX_TIMES_PASSED` times.

    A prompt whose KV comes out of a snapshot counts as short and as no work, whatever its length.

    When no prompt is being read, only the head of the queue may start. If there is no room for it
    the others wait behind it, so that small requests cannot keep a large one out.

    Only the engine thread calls it. Invariant: at most two prompts are being read, and the one
    started last is read first.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        grid_tokens: int,
        max_slice_tokens: int,
        overtake_max_tokens: int,
        pacer: SlicePacer,
    ) -> None:
        """Build an empty queue; see `Scheduler` for the arguments."""
        self._num_layers = num_layers
        self._grid_tokens = grid_tokens
        self._max_slice_cells = max(1, max_slice_tokens // grid_tokens)
        self._overtake_max_tokens = overtake_max_tokens
        self._pacer = pacer
        #: By tenant, in the order of their turns; none is without requests.
        self._waiting: dict[str, deque[_WaitingGroup]] = {}
        self._reading: list[_Reading] = []

    @property
    def num_waiting(self) -> int:
        """Requests that have not been started."""
        return sum(map(len, self._waiting.values()))

    @property
    def num_reading(self) -> int:
        """Sequences whose prompt is being read."""
        return sum(len(reading.members) for reading in self._reading)

    def waiting_groups(self) -> Iterator[tuple[Sequence, ...]]:
        """Yield the unfinished choices of each request that has not been started."""
        return (waiting.members for waiting in self._in_order())

    def reading_groups(self) -> Iterator[tuple[Sequence, ...]]:
        """Yield the unfinished choices of each prompt being read."""
        return (reading.members for reading in self._reading)

    def is_waiting(self, tenant: str) -> bool:
        """Tell whether a tenant has a request that has not been started."""
        return tenant in self._waiting

    def add(self, group: tuple[Sequence, ...]) -> None:
        """Put a request behind those of its tenant."""
        self._waiting.setdefault(group[0].tenant, deque()).append(_WaitingGroup(group))

    def forget_finished(self) -> None:
        """Let go of choices that have ended, and of requests of which no choice is left."""
        for waiting in self._in_order():
            waiting.members = _unfinished(waiting.members)
        for reading in self._reading:
            reading.members = _unfinished(reading.members)
        for tenant, own in list(self._waiting.items()):
            self._keep(tenant, deque(waiting for waiting in own if waiting.members))
        self._reading = [reading for reading in self._reading if reading.members]

    def start_next(
        self, has_room: Callable[[tuple[Sequence, ...]], bool]
    ) -> tuple[Sequence, ...] | None:
        """Start reading the next prompt that may be, by the rule of this class.

        Args:
            has_room: Whether a request could be started beside everything that has been.

        Returns:
            The request that was started, or None.
        """
        started = self._startable(has_room)
        if started is None:
            return None
        for passed in takewhile(lambda waiting: waiting is not started, self._in_order()):
            passed.num_times_passed += 1
        members = started.members
        tenant = members[0].tenant
        own = self._waiting.pop(tenant)  # comes back behind all others
        own.remove(started)
        self._keep(tenant, own)
        for sequence in members:
            sequence.status = SequenceStatus.PREFILLING
        self._reading.append(_Reading(members[0], members))
        return members

    def next_slices(self, budget_flops: float) -> tuple[PrefillSlice, ...]:
        """Cut the next slices of the prompt being read, within a budget but at least one."""
        if not self._reading:
            return ()
        reading = self._reading[-1]
        assert reading.leader is reading.members[0], "dropped without the choices it reads for"
        if reading.leader.is_restored:
            return (self._restore(reading),)
        slices: list[PrefillSlice] = []
        layer_idx, token_start = reading.layer_idx, reading.token_offset
        while layer_idx < self._num_layers:
            min_cells = 0 if slices else 1
            token_end = self._slice_end(reading.leader, token_start, budget_flops, min_cells)
            if token_end == token_start:
                break
            part = self._slice(reading, layer_idx, token_start, token_end)
            slices.append(part)
            budget_flops -= self._pacer.slice_flops(token_start, token_end)
            layer_idx, token_start = self._after(part, reading.leader)
        self._charge(reading, self.work_flops(slices))
        return tuple(slices)

    def advance(self, slices: tuple[PrefillSlice, ...]) -> tuple[Sequence, ...]:
        """Move behind slices that were run.

        Returns:
            The unfinished choices of the prompt when that was its end, else nothing.
        """
        last = slices[-1]
        reading = next((each for each in self._reading if each.leader.seq_id == last.seq_id), None)
        if reading is None:
            return ()  # dropped while its slices ran
        reading.layer_idx, reading.token_offset = self._after(last, reading.leader)
        if not last.is_last:
            return ()
        self._reading.remove(reading)
        return reading.members

    def work_flops(self, slices: Iterable[PrefillSlice]) -> float:
        """Return the work of some slices, in FLOPs."""
        return sum(
            self._pacer.slice_flops(part.token_start, part.token_end)
            for part in slices
            if not part.is_restore
        )

    def _in_order(self) -> Iterator[_WaitingGroup]:
        """Yield the queue from its head to its end."""
        rounds = zip_longest(*self._waiting.values())
        return (waiting for each in rounds for waiting in each if waiting is not None)

    def _keep(self, tenant: str, own: deque[_WaitingGroup]) -> None:
        """Take over what waits of a tenant, who leaves the queue when that is nothing."""
        if own:
            self._waiting[tenant] = own
        else:
            self._waiting.pop(tenant, None)

    def _startable(self, has_room: Callable[[tuple[Sequence, ...]], bool]) -> _WaitingGroup | None:
        """Return the request that may start now."""
        if not self._reading:
            head = next(self._in_order(), None)
            return head if head is not None and has_room(head.members) else None
        if len(self._reading) > 1 or self._reading[0].owed_flops > 0.0:
            return None
        remaining_flops = self._remaining_flops(self._reading[0])
        for waiting in self._in_order():
            if self._is_short(waiting.members[0], remaining_flops) and has_room(waiting.members):
                return waiting
            if waiting.num_times_passed >= MAX_TIMES_PASSED:
                return None
        return None

    def _is_short(self, leader: Sequence, remaining_flops: float) -> bool:
        if leader.is_restored:
            return True
        num_tokens = leader.num_prompt_tokens
        if num_tokens > self._overtake_max_tokens:
            return False
        return self._num_layers * self._pacer.slice_flops(0, num_tokens) < remaining_flops

    def _remaining_flops(self, reading: _Reading) -> float:
        num_tokens = reading.leader.num_prompt_tokens
        layers_after = self._num_layers - reading.layer_idx - 1
        return self._pacer.slice_flops(reading.token_offset, num_tokens) + (
            layers_after * self._pacer.slice_flops(0, num_tokens)
        )

    def _charge(self, reading: _Reading, flops: float) -> None:
        """Note the work of an overtaker as owed to the prompt it overtook, or pay that off."""
        # When the slices are cut, not when they are done: prompts that fail in their first step,
        # one after the other, would otherwise hold up the one behind them for nothing.
        overtaken = self._reading[0]
        if reading is overtaken:
            overtaken.owed_flops = max(0.0, overtaken.owed_flops - flops)
        else:
            overtaken.owed_flops += flops

    def _slice_end(
        self, leader: Sequence, token_start: int, budget_flops: float, min_cells: int
    ) -> int:
        """Return the furthest end on the grid that the budget reaches."""
        num_tokens, grid = leader.num_prompt_tokens, self._grid_tokens
        num_cells = min(self._max_slice_cells, -(-(num_tokens - token_start) // grid))

        def end_after(cells: int) -> int:
            return min(token_start + cells * grid, num_tokens)

        num_within = bisect_right(
            range(1, num_cells + 1),
            budget_flops,
            key=lambda cells: self._pacer.slice_flops(token_start, end_after(cells)),
        )
        return end_after(max(num_within, min_cells))

    def _restore(self, reading: _Reading) -> PrefillSlice:
        return replace(
            self._slice(reading, 0, 0, reading.leader.num_prompt_tokens),
            is_last=True,
            is_restore=True,
        )

    def _slice(
        self, reading: _Reading, layer_idx: int, token_start: int, token_end: int
    ) -> PrefillSlice:
        is_at_end = token_end == reading.leader.num_prompt_tokens
        return PrefillSlice(
            seq_id=reading.leader.seq_id,
            layer_idx=layer_idx,
            token_start=token_start,
            token_end=token_end,
            sibling_ids=tuple(sibling.seq_id for sibling in reading.members[1:]),
            is_first=layer_idx == 0 and token_start == 0,
            is_last=layer_idx == self._num_layers - 1 and is_at_end,
        )

    @staticmethod
    def _after(part: PrefillSlice, leader: Sequence) -> tuple[int, int]:
        """Return the layer and token that follow a slice."""
        if part.token_end == leader.num_prompt_tokens:
            return part.layer_idx + 1, 0
        return part.layer_idx, part.token_end
