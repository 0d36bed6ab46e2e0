"""Token ids to text as they come: never half a character, never part of a stop string."""

from collections.abc import Callable, Sequence
from typing import Final

_REPLACEMENT: Final = "\ufffd"
#: Text that ends in U+FFFD is held back: the next token may complete the character. After this
#: many tokens that all end so, the bytes are noise and are let through.
_MAX_PENDING_TOKENS: Final = 64
#: Prompt tokens that are decoded with the answer's first ones: some tokenizers drop the space of
#: the first token they are given.
_CONTEXT_TOKENS: Final = 6


class Detokenizer:
    """Text of one answer, piece by piece.

    Joining all pieces gives the whole text whatever the borders of the pieces were.

    Attributes:
        is_stopped: Whether a stop string was found; nothing more comes after that.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt_ids: Sequence[int],
        stop: tuple[str, ...],
    ) -> None:
        self._decode = decode
        self._ids = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._context_start = 0
        self._num_settled = len(self._ids)
        self._num_chars_out = 0
        self._stop = stop
        self._held = ""
        self.is_stopped = False

    def push(self, token_id: int) -> str:
        """Take one token and return the text that has become certain, often a word, maybe ""."""
        if self.is_stopped:
            return ""
        self._ids.append(token_id)
        return self._through_stop(self._new_text(is_final=False))

    def finish(self) -> str:
        """Return the text that was still held back; bytes of an unfinished character are lost."""
        if self.is_stopped:
            return ""
        text = self._through_stop(self._new_text(is_final=True))
        # Nothing is held when a stop string was found in these last characters.
        held, self._held = self._held, ""
        return text + held

    def _new_text(self, *, is_final: bool) -> str:
        """Decode the tokens that are not settled yet and return what is new and certain."""
        # Decoded together with the settled tokens before them, since some tokenizers decode a
        # token otherwise at the start of a text.
        settled = self._decode(self._ids[self._context_start : self._num_settled])
        text = self._decode(self._ids[self._context_start :])[len(settled) :]
        certain = text.rstrip(_REPLACEMENT)
        num_pending = len(self._ids) - self._num_settled
        if certain != text and not is_final and num_pending < _MAX_PENDING_TOKENS:
            new = certain[self._num_chars_out :]
            self._num_chars_out = max(self._num_chars_out, len(certain))
            return new
        new = (certain if is_final else text)[self._num_chars_out :]
        self._context_start, self._num_settled = self._num_settled, len(self._ids)
        self._num_chars_out = 0
        return new

    def _through_stop(self, text: str) -> str:
        """Hold back what may become a stop string; cut at the first one that is complete."""
        self._held += text
        found = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            certain, self._held = self._held[: min(found)], ""
            return certain
        num_held = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - num_held
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)
