"""The tokenizer of the fake engine: a word is a token."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass

from snapkv_core import QueueFullError, TokenizedText, TokenizeRequest


@dataclass(frozen=True)
class FakeTexts:
    """Numbers words as it finds them; the text of a number is itself.

    Attributes:
        pause_s: Pause before a text is looked at.
        queue_full: Refuse texts as if too many waited.
    """

    pause_s: float
    queue_full: bool

    async def tokenize(self, request: TokenizeRequest) -> TokenizedText:
        """Find the words; of messages those of all contents."""
        await asyncio.sleep(self.pause_s)
        if self.queue_full:
            raise QueueFullError(num_waiting=64, retry_after_s=2.5)
        prompt = request.prompt
        text = (
            prompt if isinstance(prompt, str) else "\n".join(part.content or "" for part in prompt)
        )
        words = list(re.finditer(r"\S+", text))
        return TokenizedText(
            text,
            tuple(range(len(words))),
            tuple(word[0] for word in words) if request.with_token_strs else None,
            tuple(word.span() for word in words) if request.with_offsets else None,
        )

    async def detokenize(self, token_ids: Sequence[int], timeout_s: float | None = None) -> str:
        """Write the numbers."""
        del timeout_s
        return " ".join(map(str, token_ids))
