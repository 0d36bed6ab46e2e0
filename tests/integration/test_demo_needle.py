"""A number hidden in essays is found from a twenty times smaller cache as from the full one."""

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from snapkv_core import CompressionConfig, Engine, EngineConfig
from snapkv_core.engine.finding import Finding
from snapkv_core.kv_cache.snapshot import PromptSnapshot
from tests.support.engines import FULL, ask, drain, make_request, summary_of, text_of
from tests.support.essays import cache_dir, load_essays

pytestmark = [pytest.mark.demo, pytest.mark.slow, pytest.mark.timeout(1_800)]

_NUM_PROMPTS = 20
_NUM_CHARS = 10_000
_QUESTION = (
    "\n\nQuestion: What is the special magic number mentioned in the text?"
    "\nAnswer: The special magic number is"
)
_SMALL = CompressionConfig(max_capacity_prompt=128, window_size=16, kernel_size=15, pooling="max")


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Load the demo model in float32, which is exact and the same on every machine."""
    config = EngineConfig(model="demo", cache_dir=str(cache_dir()), device="cpu", dtype="float32")
    return Engine.load(config)


def needle_prompts() -> Iterator[tuple[str, str, float]]:
    """Yield prompt, number and depth; numbers and places are drawn from a fixed seed."""
    essays = load_essays()
    chance = random.Random(2024)
    for index in range(_NUM_PROMPTS):
        start = essays.index(" ", chance.randrange(len(essays) - 2 * _NUM_CHARS))
        text = essays[start : start + _NUM_CHARS]
        number = str(chance.randrange(10_000, 100_000))
        depth = (index + 0.5) / _NUM_PROMPTS
        # Behind the end of the sentence that lies at this depth.
        at = text.index(". ", int(depth * (_NUM_CHARS - 1_000))) + 2
        needle = f"The special magic number is {number}. "
        yield text[:at] + needle + text[at:] + _QUESTION, number, depth


class Reader:
    """Reads a prompt once for two answers: from what was kept of it, and from all of it.

    Reading takes nearly all of the time. The engine reads for the small cache; what its layers
    hand over to be stored is noted before anything is dropped, and becomes the full cache.
    """

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._engine = engine
        self._layers: list[tuple[Tensor, Tensor]] = []
        write_layer = engine.parts.manager.write_layer

        def noting(seq_id: int, layer_idx: int, keys: Tensor, values: Tensor, **kept: Any) -> None:
            # Copies: every layer uses the same two buffers.
            self._layers.append((keys.clone(), values.clone()))
            write_layer(seq_id, layer_idx, keys, values, **kept)

        monkeypatch.setattr(engine.parts.manager, "write_layer", noting)

    def answers(self, prompt: str) -> tuple[str, str, float]:
        """Return the answers from the full and the small cache, and how much smaller it is."""
        self._layers.clear()
        given: list[PromptSnapshot | None] = []
        small, ratio = self._answer(prompt, _SMALL, Finding("stored", on_snapshot=given.append))
        snapshot = given[0]
        assert snapshot is not None
        everything = replace(
            snapshot,
            keys=tuple(keys.flatten(0, 1) for keys, _ in self._layers),
            values=tuple(values.flatten(0, 1) for _, values in self._layers),
            kv_lens=torch.full_like(snapshot.kv_lens, snapshot.num_prompt_tokens),
            kept_indices=None,
            kept_attention_mass=1.0,
        )
        full, full_ratio = self._answer(prompt, FULL, Finding("hit", everything))
        assert full_ratio == 1
        return full, small, ratio

    def _answer(
        self, prompt: str, compression: CompressionConfig, finding: Finding
    ) -> tuple[str, float]:
        request = make_request(prompt, compression, max_new_tokens=10)
        self._engine.add(request, self._engine.prepare(request), finding)
        events = drain(self._engine)
        assert self._engine.kv_bytes == 0
        report = summary_of(events).compression
        assert report is not None
        return text_of(events), report.compression_ratio


def test_the_small_cache_finds_as_many_needles_as_the_full_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(engine, monkeypatch)
    found_full, found_small, told = 0, 0, []
    for prompt, number, depth in needle_prompts():
        full, small, ratio = reader.answers(prompt)
        assert ratio > 15
        hits = [number in re.findall(r"\d+", answer)[:1] for answer in (full, small)]
        found_full += hits[0]
        found_small += hits[1]
        told.append(f"depth {depth:.2f} {number}: full {full!r}, small {small!r}")
    counts = f"full {found_full}, small {found_small} of {_NUM_PROMPTS}"
    details = "\n".join([counts, *told])
    assert found_full >= 0.8 * _NUM_PROMPTS, details
    assert abs(found_full - found_small) <= 1, details


def test_both_answers_are_those_of_reading_the_prompt_for_each(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above saves in reading changes no answer."""
    prompt, _, _ = next(needle_prompts())
    alone = [ask(engine, prompt, each, max_new_tokens=10).texts[0] for each in (FULL, _SMALL)]
    assert list(Reader(engine, monkeypatch).answers(prompt)[:2]) == alone
