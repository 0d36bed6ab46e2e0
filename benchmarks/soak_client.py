"""One caller of the soak: draws requests by lot, sends them, checks each answer, leaves some."""

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from benchmarks.completions import sse_data
from benchmarks.workload import words

_LEAVING_SHARE: Final = 0.10
#: Moments at which a client leaves lie between 0 and one of these, drawn by lot: at once (most
#: likely queued), while its prompt is read or still queued, while it is answered.
_LEAVING_WITHIN_S: Final = (0.2, 3.0, 20.0)
_MAX_RETRY_AFTER_S: Final = 3.0
#: A word of the list is a token, seldom two; a tokenizer may add a few of its own.
_MAX_TOKENS_PER_WORD: Final = 3
_MAX_PROBLEMS: Final = 20


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """A request drawn by lot.

    Attributes:
        request_id: Sent as `X-Request-Id`; no other request of the soak has it.
        body: Fields for `POST /generate`.
        num_words: Words of the prompt.
        leaves_after_s: When the client closes the connection; None to stay until the end.
    """

    request_id: str
    body: dict[str, Any]
    num_words: int
    leaves_after_s: float | None


@dataclass(slots=True)
class SoakCounts:
    """What all clients saw.

    Attributes:
        outcomes: How often `finished`, `left`, `cut off` (by the end of the soak), `retried` and
            `failed`.
        statuses: How often each HTTP status came.
        output_tokens: Tokens of the answers that came whole.
        problems: The first of what went wrong, a line each.
    """

    outcomes: dict[str, int] = field(default_factory=dict)
    statuses: dict[int, int] = field(default_factory=dict)
    output_tokens: int = 0
    problems: list[str] = field(default_factory=list)

    def count(self, outcome: str) -> None:
        """Count one outcome."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def fail(self, problem: str) -> None:
        """Count a failure, and keep it unless there are many already."""
        self.count("failed")
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(problem)


def draw_request(dice: random.Random, request_id: str) -> SoakRequest:
    """Draw prompt, knobs, length and whether the client stays."""
    num_words = dice.randrange(8, 600)
    body = {
        "prompt": words(num_words, dice.randrange(1 << 30)),
        "max_new_tokens": dice.randrange(1, 32),
        "ignore_eos": True,
        "stream": dice.random() < 0.5,
        "n": 2 if dice.random() < 0.2 else 1,
        "temperature": dice.choice((0.0, 0.8)),
        "method": "full" if dice.random() < 0.2 else "snapkv",
        "max_capacity_prompt": dice.choice((32, 128, 512)),
        "window_size": dice.choice((8, 16)),
        "kernel_size": dice.choice((1, 3, 15)),
        "pooling": dice.choice(("avg", "max")),
        "explain": dice.random() < 0.1,
    }
    leaves_after_s = None
    if dice.random() < _LEAVING_SHARE:
        leaves_after_s = dice.uniform(0, dice.choice(_LEAVING_WITHIN_S))
    return SoakRequest(request_id, body, num_words, leaves_after_s)


def answer_problems(request: SoakRequest, answer: dict[str, Any]) -> list[str]:
    """Return what is wrong with a whole answer, or with the last event of a stream."""
    problems = []
    if answer.get("id") != request.request_id:
        problems.append(f"the answer's id is {answer.get('id')!r}")
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return [*problems, "the answer has no usage"]
    num_prompt, num_output = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    most = request.num_words * _MAX_TOKENS_PER_WORD + 8
    if not request.num_words <= num_prompt <= most:
        problems.append(f"{num_prompt} prompt tokens for {request.num_words} words")
    # Nothing ends an answer early: there is no stop string and the end of sequence is ignored.
    expected = request.body["n"] * request.body["max_new_tokens"]
    if num_output != expected:
        problems.append(f"{num_output} output tokens, {expected} were asked for")
    if usage.get("total_tokens") != num_prompt + num_output:
        problems.append(f"usage does not add up: {usage}")
    return problems


async def run_client(http: httpx.AsyncClient, name: str, seed: int, counts: SoakCounts) -> None:
    """Send one request after another until cancelled.

    Args:
        http: Client with the server's address.
        name: Beginning of its request ids.
        seed: What its dice start from.
        counts: Shared by all clients.
    """
    dice = random.Random(seed)
    number = 0
    try:
        while True:
            number += 1
            request = draw_request(dice, f"{name}-{number}")
            try:
                async with asyncio.timeout(request.leaves_after_s):
                    await send(http, request, counts)
            except TimeoutError:
                counts.count("left")
    except asyncio.CancelledError:
        counts.count("cut off")
        raise


async def send(http: httpx.AsyncClient, request: SoakRequest, counts: SoakCounts) -> None:
    """Send a request until it is answered, and judge the answer; 429 and 503 are waited out."""
    while True:
        try:
            retry_after_s = await _send_once(http, request, counts)
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            # The latter three are what a malformed answer makes of reading it.
            counts.fail(f"{request.request_id}: {error!r}")
            return
        if retry_after_s is None:
            return
        counts.count("retried")
        await asyncio.sleep(min(retry_after_s, _MAX_RETRY_AFTER_S))


async def _send_once(
    http: httpx.AsyncClient, request: SoakRequest, counts: SoakCounts
) -> float | None:
    """Send a request once; returns the seconds to wait before it should be sent again, if any."""
    headers = {"X-Request-Id": request.request_id}
    async with http.stream("POST", "/generate", json=request.body, headers=headers) as response:
        status = response.status_code
        counts.statuses[status] = counts.statuses.get(status, 0) + 1
        if status in (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE):
            return float(response.headers["Retry-After"])
        if status != httpx.codes.OK:
            text = (await response.aread()).decode(errors="replace")
            counts.fail(f"{request.request_id}: {status}: {text[:300]}")
            return None
        if request.body["stream"]:
            answer = await _last_event(response, request)
        else:
            answer = json.loads(await response.aread())
    problems = answer_problems(request, answer)
    if problems:
        counts.fail(f"{request.request_id}: {'; '.join(problems)}")
    else:
        counts.count("finished")
        counts.output_tokens += answer["usage"]["completion_tokens"]
    return None


async def _last_event(response: httpx.Response, request: SoakRequest) -> dict[str, Any]:
    """Read a stream to its end and return the event before `[DONE]`.

    Raises:
        ValueError: An event belongs to another request, an error came, or the end is missing.
    """
    last: dict[str, Any] = {}
    async for data in sse_data(response.aiter_lines()):
        if data == "[DONE]":
            return last
        last = json.loads(data)
        if last["id"] != request.request_id:
            raise ValueError(f"an event of {last['id']!r} came")
        if "error" in last:
            raise ValueError(f"the stream failed: {last['error']}")
    raise ValueError("the stream ended before [DONE]")
