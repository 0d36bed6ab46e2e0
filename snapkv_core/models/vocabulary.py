"""The bytes that each token of a model stands for, as grammars and log-probabilities need them."""

from collections.abc import Iterable
from typing import Final

from llguidance import LLTokenizer, TokenizerWrapper

from snapkv_core.errors import InvalidParameterError


class Vocabulary:
    """Tokens as bytes; immutable, so any thread may use it.

    Attributes:
        ends_answers: Whether it has a token that ends an answer.
        trie: All tokens in the form in which llguidance walks them.
    """

    def __init__(self, tokenizer: str | TokenizerWrapper, eos_token_ids: Iterable[int]) -> None:
        """Read a tokenizer; takes some tenths of a second for 50,000 tokens.

        Args:
            tokenizer: The content of its `tokenizer.json`, or its tokens.
            eos_token_ids: Tokens that end an answer.

        Raises:
            InvalidParameterError: Its tokens are not known by their bytes.
        """
        eos = sorted(eos_token_ids)
        self.ends_answers: Final = bool(eos)
        try:
            self.trie: Final = LLTokenizer(tokenizer, eos_token=eos or None)
        except ValueError as error:
            raise InvalidParameterError(
                "model", f"the bytes of its tokens are not known: {error}"
            ) from error

    def bytes_of(self, token_id: int) -> bytes:
        """Return what a token stands for: maybe half a character; a special token's name."""
        # Output heads may have rows for no token at all.
        return self.trie.decode_bytes([token_id]) if token_id < self.trie.vocab_size else b""

    def is_special(self, token_id: int) -> bool:
        """Tell whether a token stands for no text."""
        return token_id >= self.trie.vocab_size or self.trie.is_special_token(token_id)
