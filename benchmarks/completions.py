"""Client of one streaming completion: sends it and notes when each piece arrives."""

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from benchmarks.errors import BenchmarkError
from benchmarks.workload import SNAPKV_FIELDS

#: Reading a long prompt behind others takes minutes, and another server may send nothing meanwhile.
TIMEOUT: Final = httpx.Timeout(30.0, read=1_200.0)
_DONE: Final = "[DONE]"


@dataclass(frozen=True, slots=True)
class Target:
    """A server under load.

    Attributes:
        name: What tables call it.
        url: Its address, without the path.
        model: Model to ask for.
        takes_knobs: Whether compression fields are sent, which other servers may refuse.
    """

    name: str
    url: str
    model: str
    takes_knobs: bool


@dataclass(slots=True)
class StreamRecord:
    """One completion, filled in while it runs; times are those of one clock, in seconds.

    Attributes:
        sent_s: When the request was sent.
        pieces_s: When each piece of text came. A piece is one token, unless tokens make up a
            character together.
        ended_s: When the stream had ended.
        prompt_tokens: Tokens of the prompt, as the server counts.
        output_tokens: Tokens of the answer, as the server counts.
    """

    sent_s: float = 0.0
    pieces_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Seconds from the request to the first piece.

        Raises:
            BenchmarkError: None has come.
        """
        if not self.pieces_s:
            raise BenchmarkError("a stream brought no text")
        return self.pieces_s[0] - self.sent_s


async def find_target(client: httpx.AsyncClient, name: str, url: str, *, knobs: bool) -> Target:
    """Ask a server which model it serves; the first one is taken.

    Raises:
        BenchmarkError: It does not say.
    """
    try:
        answer = await client.get(f"{url}/v1/models")
        model = answer.json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise BenchmarkError(f"{url}/v1/models names no model: {error!r}") from error
    return Target(name, url, model, knobs)


async def stream_completion(
    client: httpx.AsyncClient,
    target: Target,
    prompt: str,
    *,
    max_tokens: int,
    record: StreamRecord,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Send a completion and fill in its record as the answer comes.

    Raises:
        BenchmarkError: The server refused or failed it, or cannot be reached.
    """
    body: dict[str, Any] = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.takes_knobs:
        body |= SNAPKV_FIELDS
    record.sent_s = clock()
    try:
        async with client.stream("POST", f"{target.url}/v1/completions", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                text = (await answer.aread()).decode(errors="replace")
                raise BenchmarkError(f"{target.name} answered {answer.status_code}: {text[:300]}")
            async for data in sse_data(answer.aiter_lines()):
                if data == _DONE:
                    record.ended_s = clock()
                    return
                _take(json.loads(data), target.name, record, clock())
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        raise BenchmarkError(f"{target.name}: {error!r}") from error
    raise BenchmarkError(f"{target.name}: a stream ended before {_DONE}")


async def sse_data(lines: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yield the data of each server-sent event; comments and other fields are skipped."""
    data: list[str] = []
    async for line in lines:
        if line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
        elif not line and data:
            yield "\n".join(data)
            data = []
    if data:
        # Some servers leave out the blank line after the last event.
        yield "\n".join(data)


def _take(chunk: dict[str, Any], name: str, record: StreamRecord, now_s: float) -> None:
    if "error" in chunk:
        raise BenchmarkError(f"{name}: {json.dumps(chunk['error'])[:300]}")
    if any(choice.get("text") for choice in chunk.get("choices") or ()):
        record.pieces_s.append(now_s)
    if chunk.get("usage"):
        record.prompt_tokens = chunk["usage"]["prompt_tokens"]
        record.output_tokens = chunk["usage"]["completion_tokens"]
