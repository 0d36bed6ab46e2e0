"""Counts what each caller has had in the last minute, and refuses what is beyond its limits.

A process counts for itself: with several replicas a caller may have the limit of each.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from app.services.ceilings import OverCeilingError, prompt_field_of, require_size_within
from app.setting_groups.key_limits import EVERYBODY, NO_LIMITS, KeyLimits
from snapkv_core import GenerationRequest, RequestSize

WINDOW_S: Final = 60.0


class RateLimitedError(Exception):
    """A caller has had what it may have in a minute; nothing of this request was charged.

    Attributes:
        retry_after_s: Seconds after which the same request fits, if nothing else is sent.
    """

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(f"{reason}; try again in {math.ceil(retry_after_s)} seconds")
        self.retry_after_s = retry_after_s


@dataclass(slots=True, eq=False)
class Entry:
    """An amount that was charged, and when."""

    time_s: float
    amount: int


class Window:
    """Amounts of the last minute, oldest first; their sum is what counts against a limit."""

    def __init__(self) -> None:
        """Hold nothing."""
        # Any of them may be taken out, and those at both ends often are.
        self._entries: OrderedDict[Entry, None] = OrderedDict()
        self._total = 0

    def used(self, now_s: float) -> int:
        """Return the sum, without what is older than a minute."""
        while self._entries and now_s - (oldest := next(iter(self._entries))).time_s >= WINDOW_S:
            self.change(oldest, 0)
        return self._total

    def charge(self, amount: int, now_s: float) -> Entry:
        """Add an amount."""
        entry = Entry(now_s, amount)
        self._entries[entry] = None
        self._total += amount
        return entry

    def change(self, entry: Entry, amount: int) -> None:
        """Correct an amount that was charged, unless it is older than a minute."""
        if entry not in self._entries:
            return
        self._total += amount - entry.amount
        entry.amount = amount
        if amount == 0:
            del self._entries[entry]

    def wait_s(self, amount: int, limit: int, now_s: float) -> float:
        """Return the seconds until `amount`, which is within the limit, fits beside the rest."""
        excess = self.used(now_s) + amount - limit
        for entry in self._entries:
            if excess <= 0:
                break
            excess -= entry.amount
            if excess <= 0:
                return entry.time_s + WINDOW_S - now_s
        return 0.0

    def reset_s(self, now_s: float) -> float:
        """Return the seconds until nothing counts any more, if nothing else is charged."""
        self.used(now_s)
        last = next(reversed(self._entries), None)
        return 0.0 if last is None else last.time_s + WINDOW_S - now_s


@dataclass(frozen=True, slots=True)
class RateState:
    """Where a caller stands with one limit.

    Attributes:
        name: `requests` or `tokens`.
        limit: Amount per minute.
        remaining: What is left of it now.
        reset_s: Seconds until all of it is there again.
    """

    name: str
    limit: int
    remaining: int
    reset_s: float


@dataclass(slots=True)
class _Usage:
    requests: Window = field(default_factory=Window)
    tokens: Window = field(default_factory=Window)


class Grant:
    """What one request was charged: itself, then its tokens; settle or cancel it, once."""

    def __init__(
        self,
        usage: _Usage,
        limits: KeyLimits,
        request: GenerationRequest,
        clock: Callable[[], float],
    ) -> None:
        """Charge the request; see `Quotas.grant`."""
        self._usage = usage
        self._limits = limits
        self._request = request
        self._clock = clock
        self._tokens: Entry | None = None
        now_s, limit = clock(), limits.requests_per_minute
        if limit is not None and usage.requests.used(now_s) >= limit:
            raise RateLimitedError(
                f"this caller may send {limit} requests a minute, and has sent them",
                usage.requests.wait_s(1, limit, now_s),
            )
        self._entry = usage.requests.charge(1, now_s)

    def admit(self, size: RequestSize) -> None:
        """Charge the tokens of the prompt and those that the answers may have.

        Raises:
            OverCeilingError: The prompt is longer than the caller's may be, or they exceed what it
                may have in any minute.
            RateLimitedError: They exceed what is left of this minute.
        """
        require_size_within(size, self._request, self._limits)
        num_tokens = size.num_prompt_tokens + size.num_choices * size.max_new_tokens
        now_s, limit = self._clock(), self._limits.tokens_per_minute
        if limit is not None:
            self._require_possible(size, num_tokens, limit)
            if (used := self._usage.tokens.used(now_s)) + num_tokens > limit:
                raise RateLimitedError(
                    f"this caller may have {limit} tokens a minute, prompts and answers together; "
                    f"{used} are used or reserved and this request may take {num_tokens}",
                    self._usage.tokens.wait_s(num_tokens, limit, now_s),
                )
        self._tokens = self._usage.tokens.charge(num_tokens, now_s)

    def settle(self, num_tokens: int) -> None:
        """Give back what was reserved beyond `num_tokens`, those of the prompt and the answers."""
        if self._tokens is not None:
            self._usage.tokens.change(self._tokens, min(num_tokens, self._tokens.amount))

    def cancel(self) -> None:
        """Give everything back: the request was refused."""
        self._usage.requests.change(self._entry, 0)
        self.settle(0)

    def _require_possible(self, size: RequestSize, num_tokens: int, limit: int) -> None:
        if num_tokens <= limit:
            return
        raise OverCeilingError(
            "max_new_tokens" if size.num_prompt_tokens < limit else prompt_field_of(self._request),
            f"the prompt has {size.num_prompt_tokens} tokens and its answers up to "
            f"{num_tokens - size.num_prompt_tokens} more; this caller may have {limit} a minute, "
            "so that no waiting helps",
            requested=num_tokens,
            ceiling=limit,
        )


class Quotas:
    """The limits of all callers, and what each has had; used on the event loop only.

    An amount counts for a minute from when it was charged, so that no minute, wherever it begins,
    has more than the limit.
    """

    def __init__(
        self, limits: Mapping[str, KeyLimits], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Take limits by the callers' names."""
        self._limits = dict(limits)
        self._clock = clock
        self._usage: dict[str, _Usage] = {}

    def use_limits(self, limits: Mapping[str, KeyLimits]) -> None:
        """Replace the limits, from the next request on; what was used stays used."""
        self._limits = dict(limits)

    def limits_of(self, caller: str) -> KeyLimits:
        """Return what a caller may have."""
        return self._limits.get(caller) or self._limits.get(EVERYBODY) or NO_LIMITS

    def grant(self, caller: str, request: GenerationRequest) -> Grant:
        """Charge a request to its caller.

        Args:
            caller: Who sent it.
            request: The request; nothing of it is changed.

        Raises:
            RateLimitedError: The caller has sent its requests of this minute.
        """
        usage = self._usage.setdefault(caller, _Usage())
        return Grant(usage, self.limits_of(caller), request, self._clock)

    def states_of(self, caller: str) -> list[RateState]:
        """Return where a caller stands with each limit that it has."""
        limits, usage = self.limits_of(caller), self._usage.get(caller) or _Usage()
        now_s = self._clock()
        return [
            RateState(name, limit, max(0, limit - window.used(now_s)), window.reset_s(now_s))
            for name, limit, window in (
                ("requests", limits.requests_per_minute, usage.requests),
                ("tokens", limits.tokens_per_minute, usage.tokens),
            )
            if limit is not None
        ]
