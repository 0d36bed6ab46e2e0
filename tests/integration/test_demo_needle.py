"""A number hidden in essays is found from a twenty times smaller cache as from the full one."""

import random
import re
from collections.abc import Iterator

import pytest

from snapkv_core import CompressionConfig, Engine, EngineConfig
from tests.support.engines import FULL, ask
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


def test_the_small_cache_finds_as_many_needles_as_the_full_one(engine: Engine) -> None:
    found_full, found_small, told = 0, 0, []
    for prompt, number, depth in needle_prompts():
        answers = {}
        for name, compression in (("full", FULL), ("small", _SMALL)):
            output = ask(engine, prompt, compression, max_new_tokens=10)
            answers[name] = output.texts[0]
            report = output.summary.compression
            assert report is not None
            if name == "small":
                assert report.compression_ratio > 15
        hits = [number in re.findall(r"\d+", answers[name])[:1] for name in ("full", "small")]
        found_full += hits[0]
        found_small += hits[1]
        told.append(f"depth {depth:.2f} {number}: {answers}")
    counts = f"full {found_full}, small {found_small} of {_NUM_PROMPTS}"
    details = "\n".join([counts, *told])
    assert found_full >= 0.8 * _NUM_PROMPTS, details
    assert abs(found_full - found_small) <= 1, details
