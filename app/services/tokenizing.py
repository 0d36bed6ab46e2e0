"""Texts to tokens and back on the served model's tokenizer, without generating anything."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.services.ports import GenerationEngine
from snapkv_core import TokenizedText, TokenizeRequest


@dataclass(frozen=True, slots=True)
class TokenizeResult:
    """The tokens of a text, and how many of them the model takes.

    Attributes:
        tokenized: The tokens.
        max_model_len: Tokens that prompt and answer may have together.
    """

    tokenized: TokenizedText
    max_model_len: int


class TokenizingService:
    """Tokenises on whatever engine there is; used on the event loop only."""

    def __init__(self, engine: Callable[[], GenerationEngine]) -> None:
        """Ask the engine that `engine` returns, which may raise while there is none."""
        self._engine = engine

    async def tokenize(self, request: TokenizeRequest) -> TokenizeResult:
        """Return the tokens of a text.

        Raises:
            EngineNotReadyError: There is no engine yet.
            SnapKVError: The text is refused, or it took too long.
        """
        engine = self._engine()
        return TokenizeResult(await engine.texts.tokenize(request), engine.max_model_len)

    async def detokenize(self, token_ids: Sequence[int], timeout_s: float | None) -> str:
        """Return the text of tokens, special ones included.

        Raises:
            EngineNotReadyError: There is no engine yet.
            SnapKVError: The tokens are refused, or it took too long.
        """
        return await self._engine().texts.detokenize(token_ids, timeout_s)
