"""Memory promised to requests, in pages and bytes; it knows no tensor and allocates nothing."""

from collections.abc import Callable
from dataclasses import dataclass

from snapkv_core.errors import InvalidParameterError, KVCacheError, RequestTooLargeError
from snapkv_core.kv_cache.layout import KVLayout
from snapkv_core.sequence import Sequence


@dataclass(slots=True, eq=False)
class _Reservation:
    """What the choices of one request may come to need.

    Attributes:
        shared_pages: Pages full of kept prompt tokens, one set for all choices.
        tail_pages: Further pages of each choice, at its longest.
        workspace_bytes: Bytes for reading the prompt; 0 once it has been read.
        seq_ids: Choices that have not ended.
    """

    shared_pages: int
    tail_pages: int
    workspace_bytes: int
    seq_ids: set[int]

    @property
    def num_pages(self) -> int:
        """Pages held now."""
        if not self.seq_ids:
            return 0
        return self.shared_pages + len(self.seq_ids) * self.tail_pages


class MemoryLedger:
    """Admission by reservation: what has been started always fits until its last token.

    A group is the `n` sequences of one request, which share prompt, sampling and compression.
    Its reservation is the worst case, known before the prompt is read: the kept prompt, the
    longest answer of each choice, and the workspace that holds the prompt while it is read. So
    nothing running is ever evicted, and one request cannot run another out of memory.

    Only the engine thread calls it, but for `require_possible`. Invariant, see `check_integrity`:
    both totals are the sums over the reservations, and neither exceeds what there is.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_pages: int,
        workspace_bytes: int,
        workspace_for: Callable[[int], int],
    ) -> None:
        """Open an empty ledger.

        Args:
            layout: Shape of the KV cache.
            num_pages: Pages of the pool that sequences may use.
            workspace_bytes: Bytes for all prompts that are being read at once.
            workspace_for: Bytes that a prompt of so many tokens needs while it is read.
        """
        self._layout = layout
        self._num_pages = num_pages
        self._workspace_bytes = workspace_bytes
        self._workspace_for = workspace_for
        self._reservations: dict[int, _Reservation] = {}
        self._num_pages_reserved = 0
        self._workspace_bytes_reserved = 0

    @property
    def num_pages_total(self) -> int:
        """Pages that sequences may use."""
        return self._num_pages

    @property
    def num_pages_reserved(self) -> int:
        """Pages promised to sequences that have been started."""
        return self._num_pages_reserved

    @property
    def workspace_bytes_reserved(self) -> int:
        """Bytes promised to prompts that are being read."""
        return self._workspace_bytes_reserved

    @property
    def reserved_ids(self) -> frozenset[int]:
        """Sequences that hold a reservation."""
        return frozenset(self._reservations)

    def require_possible(self, group: tuple[Sequence, ...], field: str) -> None:
        """Refuse a request that could not start even if nothing else ran; any thread may call.

        Args:
            group: The sequences of the request.
            field: The parameter to name in the error.

        Raises:
            RequestTooLargeError: Its pages exceed the pool.
            InvalidParameterError: Its prompt is too long for the workspace.
        """
        needed = self._worst_case(group)
        if needed.num_pages > self._num_pages:
            raise RequestTooLargeError(
                field,
                needed_bytes=needed.num_pages * self._layout.page_bytes,
                available_bytes=self._num_pages * self._layout.page_bytes,
            )
        if needed.workspace_bytes > self._workspace_bytes:
            raise InvalidParameterError(
                field,
                f"reading a prompt of {group[0].num_prompt_tokens} tokens takes "
                f"{needed.workspace_bytes} bytes of working memory; this server sets aside "
                f"{self._workspace_bytes}. Send a shorter prompt",
            )

    def fits(self, group: tuple[Sequence, ...]) -> bool:
        """Tell whether a request could be started beside everything that has been."""
        return self._has_room_for(self._worst_case(group))

    def reserve(self, group: tuple[Sequence, ...]) -> None:
        """Promise a request what it needs at worst.

        Raises:
            KVCacheError: It does not fit, or holds a reservation already; nothing has changed.
        """
        needed = self._worst_case(group)
        if not self._has_room_for(needed):
            raise KVCacheError(f"request {group[0].request_id} does not fit beside the others")
        known = needed.seq_ids & self._reservations.keys()
        if known:
            raise KVCacheError(f"sequences {sorted(known)} hold a reservation already")
        self._reservations.update(dict.fromkeys(needed.seq_ids, needed))
        self._num_pages_reserved += needed.num_pages
        self._workspace_bytes_reserved += needed.workspace_bytes

    def release_workspace(self, group: tuple[Sequence, ...]) -> None:
        """Take back what reading the prompt needed; a second call changes nothing."""
        for sequence in group:
            reservation = self._reservations.get(sequence.seq_id)
            if reservation is not None:
                self._close_workspace(reservation)

    def release(self, sequence: Sequence) -> None:
        """Take back what one choice held; with a request's last one go all its pages and bytes.

        A sequence that holds nothing is fine, so callers need not know how far it came.
        """
        reservation = self._reservations.pop(sequence.seq_id, None)
        if reservation is None:
            return
        num_pages_before = reservation.num_pages
        reservation.seq_ids.discard(sequence.seq_id)
        self._num_pages_reserved -= num_pages_before - reservation.num_pages
        if not reservation.seq_ids:
            self._close_workspace(reservation)

    def check_integrity(self) -> None:
        """Check the invariant.

        Raises:
            KVCacheError: It is broken.
        """
        reservations = {id(held): held for held in self._reservations.values()}.values()
        totals = (
            (
                "pages",
                sum(held.num_pages for held in reservations),
                self._num_pages_reserved,
                self._num_pages,
            ),
            (
                "bytes of workspace",
                sum(held.workspace_bytes for held in reservations),
                self._workspace_bytes_reserved,
                self._workspace_bytes,
            ),
        )
        for what, counted, booked, available in totals:
            if counted != booked:
                raise KVCacheError(f"{booked} {what} are booked as reserved, {counted} are")
            if booked > available:
                raise KVCacheError(f"{booked} {what} are reserved, there are {available}")

    def _worst_case(self, group: tuple[Sequence, ...]) -> _Reservation:
        leader = group[0]
        num_prompt_tokens = leader.num_prompt_tokens
        num_kept = leader.compression.num_kept(num_prompt_tokens)
        return _Reservation(
            shared_pages=self._layout.shared_pages(num_kept),
            tail_pages=self._layout.tail_pages(num_kept, leader.max_new_tokens),
            # What comes out of a snapshot goes straight to its pages.
            workspace_bytes=0 if leader.is_restored else self._workspace_for(num_prompt_tokens),
            seq_ids={sequence.seq_id for sequence in group},
        )

    def _has_room_for(self, needed: _Reservation) -> bool:
        return (
            self._num_pages_reserved + needed.num_pages <= self._num_pages
            and self._workspace_bytes_reserved + needed.workspace_bytes <= self._workspace_bytes
        )

    def _close_workspace(self, reservation: _Reservation) -> None:
        self._workspace_bytes_reserved -= reservation.workspace_bytes
        reservation.workspace_bytes = 0
