"""Servers of one answer for tests of the benchmarks' clients."""

import json
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import httpx

from benchmarks.completions import Target

TARGET = Target("this server", "http://test", "model", takes_knobs=True)


class Chunks(httpx.AsyncByteStream):
    """A body that comes in given pieces, with something done before each."""

    def __init__(self, pieces: Iterable[bytes], before: Callable[[], object]) -> None:
        """Take the pieces, and what to call before each."""
        self._pieces = pieces
        self._before = before

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the pieces."""
        for piece in self._pieces:
            self._before()
            yield piece


def event(data: object) -> bytes:
    """Return one server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data)
    return f"data: {text}\n\n".encode()


def piece(text: str) -> bytes:
    """Return an event of a completion with some text."""
    return event({"choices": [{"index": 0, "text": text}]})


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    """Return the event of a completion that counts its tokens."""
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return event({"choices": [], "usage": counts})


DONE = event("[DONE]")


def answering(
    pieces: Iterable[bytes],
    *,
    status: int = 200,
    before: Callable[[], object] = lambda: None,
    sent: list[dict[str, Any]] | None = None,
) -> httpx.AsyncClient:
    """Return a client whose every request gets the same answer.

    Args:
        pieces: The body.
        status: Its status.
        before: Called before each piece.
        sent: Takes the bodies of the requests.
    """
    body = list(pieces)

    def handle(request: httpx.Request) -> httpx.Response:
        if sent is not None:
            sent.append(json.loads(request.content))
        return httpx.Response(status, stream=Chunks(body, before))

    return httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://test")
