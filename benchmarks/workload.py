"""What is measured: sizes, compression, and prompts that are the same in every run."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from snapkv_core import CompressionConfig

FULL: Final = CompressionConfig(method="full")
SNAPKV: Final = CompressionConfig(
    max_capacity_prompt=512, window_size=16, kernel_size=15, pooling="max"
)
#: The same as fields of an HTTP request.
SNAPKV_FIELDS: Final[dict[str, Any]] = {
    "method": "snapkv",
    "max_capacity_prompt": SNAPKV.max_capacity_prompt,
    "window_size": SNAPKV.window_size,
    "kernel_size": SNAPKV.kernel_size,
    "pooling": SNAPKV.pooling,
}

_VOCABULARY: Final = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea body information back "
    "parent face others level office door health person art war history party result change "
    "morning reason research girl guy moment air teacher force education the of and to in is that "
    "for it as was with be by on not he his but at are this have from or had an they which one"
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured.

    Attributes:
        batch_sizes: Sequences decoded together, choices of one request.
        prompt_lengths: Prompt tokens of each.
        headline_batch: Distinct requests decoded together for the headline ratios.
        headline_lengths: Short and long prompts of these, tokens.
        rounds: Times that the sides of a ratio take turns.
        steps_per_round: Decode steps timed in each turn.
        prefill_lengths: Prompts read by the engine and by transformers, tokens.
        prefill_rounds: Times that these two take turns.
        memory_batch: Distinct prompts held at once for the memory figures.
        memory_tokens: Tokens of each.
        attention_tokens: Stored tokens per sequence, compressed and full, for attention alone.
        http_streams: Concurrent streams.
        http_lengths: Prompt tokens of each.
        http_new_tokens: Answer tokens of each.
        mixed_running: Streams that run when a long prompt arrives.
        mixed_running_tokens: Prompt tokens of these.
        mixed_long_tokens: Prompt tokens of the long one.
        mixed_short_tokens: Prompt tokens of the one after it.
        mixed_delay_s: Seconds between these two.
    """

    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    prompt_lengths: tuple[int, ...] = (1024, 2048, 4096, 6144)
    headline_batch: int = 8
    headline_lengths: tuple[int, int] = (1024, 6144)
    rounds: int = 5
    steps_per_round: int = 8
    prefill_lengths: tuple[int, ...] = (3072, 6144)
    prefill_rounds: int = 2
    memory_batch: int = 4
    memory_tokens: int = 2048
    attention_tokens: tuple[int, ...] = (576, 6144)
    http_streams: tuple[int, ...] = (1, 4, 8)
    http_lengths: tuple[int, ...] = (1024, 3072, 6144)
    http_new_tokens: int = 64
    mixed_running: int = 4
    mixed_running_tokens: int = 512
    mixed_long_tokens: int = 6144
    mixed_short_tokens: int = 200
    mixed_delay_s: float = 2.0


FULL_SIZES: Final = Sizes()
#: Shows that everything runs; its prompts hardly exceed the capacity, so its ratios say nothing.
QUICK_SIZES: Final = Sizes(
    batch_sizes=(1, 2),
    prompt_lengths=(128, 600),
    headline_batch=2,
    headline_lengths=(128, 600),
    rounds=2,
    steps_per_round=2,
    prefill_lengths=(256,),
    prefill_rounds=1,
    memory_batch=2,
    memory_tokens=600,
    attention_tokens=(64, 128),
    http_streams=(1, 2),
    http_lengths=(64, 256),
    http_new_tokens=8,
    mixed_running=2,
    mixed_running_tokens=32,
    mixed_long_tokens=1024,
    mixed_short_tokens=32,
    mixed_delay_s=0.2,
)


def token_ids(num_tokens: int, variant: int, vocab_size: int) -> tuple[int, ...]:
    """Return real token ids in no real order: what they say changes neither time nor memory.

    Args:
        num_tokens: Length of the prompt.
        variant: Prompts of different variants share no beginning.
        vocab_size: Ids are below it.
    """
    return tuple((variant * 104_729 + index * 7_919) % vocab_size for index in range(num_tokens))


def words(num_words: int, variant: int) -> str:
    """Return common English words in no order, about one token each to a usual tokenizer."""
    return " ".join(random.Random(variant).choices(_VOCABULARY.split(), k=num_words))


def text_of(num_tokens: int, variant: int, count_tokens: Callable[[str], int] | None) -> str:
    """Return words of about `num_tokens` tokens.

    Args:
        num_tokens: Length aimed at; exceeded never, missed by a token or two.
        variant: Prompts of different variants are different.
        count_tokens: The model's tokenizer; without one a word counts as a token.
    """
    text = words(num_tokens, variant)
    if count_tokens is None:
        return text
    parts = text.split(" ")
    low, high = 1, len(parts)
    while low < high:
        middle = (low + high + 1) // 2
        if count_tokens(" ".join(parts[:middle])) <= num_tokens:
            low = middle
        else:
            high = middle - 1
    return " ".join(parts[:low])
