"""The rules of scheduling stated once more: plain lists, and everything counted from scratch.

A prompt is a list of cells, one grid cell of tokens in one layer each; work is summed token by
token, pages are counted one by one, debts and passes are read off a history. Shares no code with
`snapkv_core`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rules:
    """The numbers that the scheduler, its ledger and its pacer are built with."""

    num_layers: int
    num_kv_heads: int
    page_size: int
    grid_tokens: int
    max_slice_tokens: int
    max_num_seqs: int
    max_num_waiting: int
    overtake_max_tokens: int
    num_pages: int
    workspace_bytes: int
    workspace_bytes_per_token: int
    work_per_token: int
    work_per_pair: int
    eos_token_ids: frozenset[int]


@dataclass(eq=False)
class Request:
    """One request and what became of it.

    Attributes:
        ids: Its choices; those that ended are taken out.
        tenant: Whose it is.
        leader: The choice that reads, once reading began.
        log_start: Length of the work log when reading began.
        cells_done: Cells that were read.
    """

    ids: list[int]
    num_prompt_tokens: int
    capacity: int | None
    max_new_tokens: int
    deadline: float
    ignore_eos: bool
    tenant: str = ""
    leader: int | None = None
    log_start: int = 0
    cells_done: int = 0
    num_answered: dict[int, int] = field(default_factory=dict)


#: Sequence, layer, first token, token after the last, siblings, is first, is last.
Slice = tuple[int, int, int, int, tuple[int, ...], bool, bool]


class SchedulerSimulation:
    """What the scheduler must do, step by step."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.arrived: list[Request] = []
        self.queue: list[Request] = []
        self.reading: list[Request] = []
        self.running: list[tuple[int, Request]] = []
        #: For each start, who stood before the one that was started.
        self.passes: list[set[Request]] = []
        #: The last thing that each tenant's turn depends on: its start, or that it came.
        self.turns: list[str] = []
        self.work_log: list[tuple[Request, int]] = []

    # ------------------------------------------------------------------ sizes

    def cells(self, request: Request) -> list[tuple[int, int, int]]:
        """List a prompt's cells in reading order: layer, first token, token after the last."""
        grid, length = self.rules.grid_tokens, request.num_prompt_tokens
        return [
            (layer, start, min(start + grid, length))
            for layer in range(self.rules.num_layers)
            for start in range(0, length, grid)
        ]

    def work(self, cells: Iterable[tuple[int, int, int]]) -> int:
        """Sum the work of cells, token by token."""
        rules = self.rules
        return sum(
            rules.work_per_token + rules.work_per_pair * (position + 1)
            for _, start, end in cells
            for position in range(start, end)
        )

    def pages(self, request: Request) -> int:
        """Count the pages of the request's unfinished choices, page by page."""
        if not request.ids:
            return 0
        size, kept = self.rules.page_size, request.num_prompt_tokens
        if request.capacity is not None:
            kept = min(kept, request.capacity)
        count = 0
        for first_token in range(0, kept + request.max_new_tokens, size):
            is_shared = first_token + size <= kept
            count += 1 if is_shared else len(request.ids)
        return count * self.rules.num_layers * self.rules.num_kv_heads

    def workspace(self, request: Request) -> int:
        """Return the bytes that reading the prompt takes."""
        return self.rules.workspace_bytes_per_token * request.num_prompt_tokens

    def pages_reserved(self) -> int:
        """Count the pages of everything that was started."""
        return sum(self.pages(request) for request in self._alive())

    def workspace_reserved(self) -> int:
        """Count the bytes of everything that is being read."""
        return sum(self.workspace(request) for request in self.reading)

    def is_possible(self, request: Request) -> bool:
        """Tell whether the request could run alone."""
        return (
            self.pages(request) <= self.rules.num_pages
            and self.workspace(request) <= self.rules.workspace_bytes
        )

    # ------------------------------------------------------------------ events

    def add(self, request: Request) -> bool:
        """Queue a request; False when the queue is full and its tenant is in it."""
        is_there = any(other.tenant == request.tenant for other in self.queue)
        if is_there and len(self.queue) >= self.rules.max_num_seqs + self.rules.max_num_waiting:
            return False
        if not is_there:
            self.turns.append(request.tenant)
        self.arrived.append(request)
        self.queue.append(request)
        return True

    def drop(self, seq_id: int) -> None:
        """Forget one choice, wherever it is."""
        for request in self.arrived:
            if seq_id in request.ids:
                request.ids.remove(seq_id)
        self.queue = [request for request in self.queue if request.ids]
        self.reading = [request for request in self.reading if request.ids]
        self.running = [(each, request) for each, request in self.running if each != seq_id]

    def expired(self, now: float) -> set[int]:
        """Name the sequences whose time is up."""
        late = {seq_id for seq_id, request in self.running if request.deadline <= now}
        for request in self.queue + self.reading:
            if request.deadline <= now:
                late |= set(request.ids)
        return late

    def plan(self, budget: float) -> tuple[list[Slice], list[int]]:
        """Start what may start; return the slices to read and the sequences to decode."""
        while (request := self._may_start()) is not None:
            order = self.in_order()
            self.passes.append(set(order[: order.index(request)]))
            self.queue.remove(request)
            self.turns.append(request.tenant)
            self.reading.append(request)
            request.leader = request.ids[0]
            request.log_start = len(self.work_log)
        return self._cut(budget), [seq_id for seq_id, _ in self.running]

    def end_step(self, slices: list[Slice], tokens: dict[int, int]) -> None:
        """Take over what a step gave; failed sequences were dropped before."""
        for request in list(self.reading):
            if slices and request.leader == slices[0][0]:
                request.cells_done = 1 + self.cells(request).index(self._last_cell(slices[-1]))
                if slices[-1][-1]:
                    self.reading.remove(request)
                    self.running += [(seq_id, request) for seq_id in request.ids]
        for seq_id, request in list(self.running):
            if seq_id in tokens:
                answered = request.num_answered.get(seq_id, 0) + 1
                request.num_answered[seq_id] = answered
                is_eos = tokens[seq_id] in self.rules.eos_token_ids and not request.ignore_eos
                if is_eos or answered == request.max_new_tokens:
                    self.drop(seq_id)

    # ------------------------------------------------------------------ rules

    def _alive(self) -> list[Request]:
        requests = list(self.reading)
        for _, request in self.running:
            if request not in requests:
                requests.append(request)
        return requests

    def _has_room(self, request: Request) -> bool:
        num_taken = len(self.running) + sum(len(each.ids) for each in self.reading)
        return (
            num_taken + len(request.ids) <= self.rules.max_num_seqs
            and self.pages_reserved() + self.pages(request) <= self.rules.num_pages
            and self.workspace_reserved() + self.workspace(request) <= self.rules.workspace_bytes
        )

    def _may_start(self) -> Request | None:
        if not self.reading:
            heads = [request for request in self.in_order()[:1] if self._has_room(request)]
            return heads[0] if heads else None
        if len(self.reading) == 2 or self.owed(self.reading[0]) > 0:
            return None
        overtaken = self.reading[0]
        remaining = self.work(self.cells(overtaken)[overtaken.cells_done :])
        order = self.in_order()
        num_passed = [self.times_passed(request) for request in order]
        eligible = [
            request
            for place, request in enumerate(order)
            if request.num_prompt_tokens <= self.rules.overtake_max_tokens
            and max(num_passed[:place], default=0) < 8
            and self.work(self.cells(request)) < remaining
            and self._has_room(request)
        ]
        return eligible[0] if eligible else None

    def times_passed(self, request: Request) -> int:
        """Count the starts of requests behind a request that waits."""
        return sum(request in before for before in self.passes)

    def in_order(self) -> list[Request]:
        """Sort those that wait: a tenant's n-th in the n-th round, whose turn is oldest first."""
        last_turn = {tenant: place for place, tenant in enumerate(self.turns)}
        rounds: list[list[Request]] = [[] for _ in self.queue]
        for tenant in sorted({request.tenant for request in self.queue}, key=last_turn.__getitem__):
            own = [request for request in self.queue if request.tenant == tenant]
            for number, request in enumerate(own):
                rounds[number].append(request)
        return [request for each in rounds for request in each]

    def owed(self, overtaken: Request) -> int:
        """Return the work that overtakers were given and a prompt was not given since."""
        owed = 0
        for request, work in self.work_log[overtaken.log_start :]:
            owed = max(0, owed - work) if request is overtaken else owed + work
        return owed

    def _cut(self, budget: float) -> list[Slice]:
        if not self.reading:
            return []
        request = self.reading[-1]
        left = self.cells(request)[request.cells_done :]
        taken = left[:1]
        while len(taken) < len(left) and self.work(left[: len(taken) + 1]) <= budget:
            taken = left[: len(taken) + 1]
        self.work_log.append((request, self.work(taken)))
        return self._merge(request, taken)

    def _merge(self, request: Request, cells: list[tuple[int, int, int]]) -> list[Slice]:
        max_cells = max(1, self.rules.max_slice_tokens // self.rules.grid_tokens)
        runs: list[list[tuple[int, int, int]]] = []
        for cell in cells:
            if runs and runs[-1][0][0] == cell[0] and len(runs[-1]) < max_cells:
                runs[-1].append(cell)
            else:
                runs.append([cell])
        every = self.cells(request)
        return [
            (
                request.ids[0],
                run[0][0],
                run[0][1],
                run[-1][2],
                tuple(request.ids[1:]),
                run[0] == every[0],
                run[-1] == every[-1],
            )
            for run in runs
        ]

    def _last_cell(self, part: Slice) -> tuple[int, int, int]:
        _, layer, _, end, *_ = part
        return layer, (end - 1) // self.rules.grid_tokens * self.rules.grid_tokens, end
