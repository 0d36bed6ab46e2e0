"""Random requests, aborts, deadlines and faults by the hundred leave nothing behind."""

import itertools
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import pytest
from torch import Tensor

from snapkv_core import (
    CompressionConfig,
    Engine,
    FinishReason,
    GenerationRequest,
    InvalidParameterError,
    QueueFullError,
    TokenEvent,
)
from snapkv_core.attention.base import PagedKV
from snapkv_core.engine.parts import EngineParts
from snapkv_core.engine.step_plan import DecodeBatch, PrefillSlice
from snapkv_core.sequence import Sequence
from tests.support.engines import FULL, ask, make_engine, make_request
from tests.support.models import build_model, random_prompt

_NUM_REQUESTS = 500
#: How many calls there are from one fault to the next.
_EVERY: Final = {
    "slice, before": 61,
    "slice, in a layer": 151,
    "slice, after": 67,
    "batch, before": 59,
    "batch, in a layer": 173,
    "batch, after": 71,
    "rows of NaN": 23,
}
_PROBE = random_prompt(50, seed=9)


class InjectedError(Exception):
    """Raised where a kernel might fail."""


class Faults:
    """Makes the runner fail now and then, before, in or after its work, or give rows of NaN."""

    def __init__(self, parts: EngineParts, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        self._num_calls: Counter[str] = Counter()
        runner, backend = parts.runner, parts.backend
        self._run_slice, self._run_batch = runner.run_slice, runner.run_batch
        self._prefill, self._decode = backend.prefill, backend.decode
        monkeypatch.setattr(backend, "prefill", self.prefill)
        monkeypatch.setattr(backend, "decode", self.decode)
        monkeypatch.setattr(runner, "run_slice", self.run_slice)
        monkeypatch.setattr(runner, "run_batch", self.run_batch)

    def run_slice(self, part: PrefillSlice, sequences: Mapping[int, Sequence]) -> Tensor | None:
        """Run a slice."""
        self._maybe_raise("slice, before")
        logits = self._run_slice(part, sequences)
        self._maybe_raise("slice, after")
        return logits

    def run_batch(self, batch: DecodeBatch, sequences: Mapping[int, Sequence]) -> Tensor:
        """Run a batch."""
        self._maybe_raise("batch, before")
        logits = self._run_batch(batch, sequences)
        self._maybe_raise("batch, after")
        if self._is_due("rows of NaN"):
            logits[self.counts["rows of NaN"] % len(logits)] = float("nan")
        return logits

    def prefill(self, query: Tensor, keys: Tensor, values: Tensor, *, scaling: float) -> Tensor:
        """Attend in a slice."""
        self._maybe_raise("slice, in a layer")
        return self._prefill(query, keys, values, scaling=scaling)

    def decode(self, query: Tensor, stored: PagedKV, *, scaling: float) -> Tensor:
        """Attend in a batch."""
        self._maybe_raise("batch, in a layer")
        return self._decode(query, stored, scaling=scaling)

    def _maybe_raise(self, moment: str) -> None:
        if self._is_due(moment):
            raise InjectedError

    def _is_due(self, fault: str) -> bool:
        self._num_calls[fault] += 1
        is_due = self._num_calls[fault] % _EVERY[fault] == 0
        self.counts[fault] += is_due
        return is_due


class Load:
    """Sends requests over time, aborts some, and keeps account of every event."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.summaries: Counter[str] = Counter()
        self.reasons: Counter[FinishReason] = Counter()
        self.refused: Counter[str] = Counter()
        self._chance = random.Random(seed)
        self._ends: dict[str, set[int]] = {}
        self._sent: dict[str, GenerationRequest] = {}
        self._seeds = itertools.count()

    def run(self, num_requests: int) -> None:
        """Send so many requests and step until all have ended."""
        num_sent = 0
        while num_sent < num_requests or self.engine.has_work:
            for _ in range(min(self._chance.choice([0, 0, 1, 2, 6]), num_requests - num_sent)):
                num_sent += 1
                self._send()
            if self._sent and self._chance.random() < 0.12:
                request_id = self._chance.choice(list(self._sent))
                self._take(self.engine.abort(request_id))
                self.engine.check_integrity()
            if self.engine.has_work:
                self._take(self.engine.step())
            self.engine.check_integrity()
        assert self._sent == {}
        assert self.summaries.total() == num_requests - self.refused.total()
        assert set(self.summaries.values()) == {1}

    def _send(self) -> None:
        request = self._draw()
        try:
            self.engine.add_request(request)
        except (QueueFullError, InvalidParameterError) as error:
            self.refused[type(error).__name__] += 1
        else:
            self._sent[request.request_id] = request
            self._ends[request.request_id] = set()

    def _draw(self) -> GenerationRequest:
        chance = self._chance
        # Prompts of 600 tokens in full exceed the pool with three answers, and fit it with one.
        request = make_request(
            random_prompt(chance.choice([1, 9, 40, 90, 270, 600]), seed=next(self._seeds) % 20),
            chance.choice([FULL, CompressionConfig(max_capacity_prompt=24, window_size=8)]),
            max_new_tokens=chance.randint(1, 30),
            temperature=chance.choice([0.0, 1.0]),
            seed=chance.randrange(100),
            n=chance.choice([1, 1, 2, 3]),
            stop=chance.choice([(), ("a", "\x00")]),
        )
        # Over before it can start, perhaps in time, and surely in time.
        return replace(request, timeout_s=chance.choice([1e-6, 0.03, 0.3, 60.0, None]))

    def _take(self, events: list[TokenEvent]) -> None:
        for event in events:
            request = self._sent[event.request_id]  # nothing comes after the summary
            ends = self._ends[event.request_id]
            assert event.choice_index not in ends, "an event after the choice's last"
            if event.finish_reason is not None:
                ends.add(event.choice_index)
                self.reasons[event.finish_reason] += 1
                wants_error = event.finish_reason in (FinishReason.ERROR, FinishReason.DEADLINE)
                assert (event.error is not None) == wants_error
            if event.summary is not None:
                assert ends == set(range(request.sampling.n))
                assert len(event.summary.finish_reasons) == request.sampling.n
                self.summaries[event.request_id] += 1
                del self._sent[event.request_id]


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16])
def test_no_request_is_lost_and_nothing_is_left(
    page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A token takes 3 layers x 1 head x 2 x 16 numbers x 4 bytes; the pool holds 650 of them.
    settings: dict[str, Any] = {
        "max_num_seqs": 6,
        "max_num_waiting": 12,
        "page_size": page_size,
        "kv_cache_bytes": 650 * 3 * 2 * 16 * 4,
        "decode_gap_target_ms": 2,
    }
    model = build_model("mistral", 1, seed=71)
    engine = make_engine(model, **settings)
    expected = ask(engine, _PROBE, max_new_tokens=20, ignore_eos=True).token_ids
    load = Load(engine, seed=page_size)
    with monkeypatch.context() as patched:
        faults = Faults(engine.parts, patched)
        load.run(_NUM_REQUESTS)

    assert not engine.has_work
    assert engine.parts.manager.num_pages_used == 0
    assert engine.parts.ledger.num_pages_reserved == 0
    assert engine.parts.ledger.workspace_bytes_reserved == 0
    assert ask(engine, _PROBE, max_new_tokens=20, ignore_eos=True).token_ids == expected
    # All of it has happened, or the test proves less than it says.
    assert [reason for reason in FinishReason if load.reasons[reason] < 5] == [], load.reasons
    assert load.refused["QueueFullError"] > 0
    assert load.refused["RequestTooLargeError"] > 0
    assert all(faults.counts[fault] > 0 for fault in _EVERY), faults.counts
