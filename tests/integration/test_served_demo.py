"""The real server on the real demo model: what callers see while long prompts are read."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.essays import load_essays
from tests.support.markdown import ROOT
from tests.support.served import example_environment, free_port, serving, wait_until_ready

pytestmark = [pytest.mark.slow, pytest.mark.demo, pytest.mark.timeout(900)]

KNOBS = {"max_capacity_prompt": 128, "window_size": 16, "kernel_size": 15, "pooling": "max"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the demo model."""
    folder = tmp_path_factory.mktemp("served")
    with serving(example_environment(folder), folder / "server.log") as address:
        yield f"http://{address}"


def generate(url: str, **fields: Any) -> dict[str, Any]:
    """Send a request and return its answer."""
    answer = httpx.post(f"{url}/generate", json=fields, timeout=600)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def stream(url: str, **fields: Any) -> list[dict[str, Any]]:
    """Send a streaming request and return its events."""
    body = {**fields, "stream": True}
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=600) as answer:
        assert answer.status_code == 200
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def running_sequences(url: str) -> float:
    """Read from the metrics how many sequences the engine holds."""
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith("snapkv_sequences_running "):
            return float(line.split()[1])
    raise AssertionError("the metric is missing")


def prompt_of(num_chars: int, start: int = 0) -> str:
    """Cut a prompt out of the essays."""
    return load_essays()[start : start + num_chars]


async def test_probes_are_answered_while_a_long_prompt_is_read(url: str) -> None:
    """Liveness, readiness and metrics take less than a second beside 6,000 prompt tokens."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        body = {"prompt": prompt_of(26_500), "max_new_tokens": 2, **KNOBS}
        reading = asyncio.create_task(client.post("/generate", json=body))
        waits = []
        while not reading.done():
            for path in ("/health/live", "/health/ready", "/metrics"):
                started_s = time.monotonic()
                assert (await client.get(path)).status_code == 200
                waits.append(time.monotonic() - started_s)
            await asyncio.sleep(0.5)
    answer = reading.result().json()
    assert answer["usage"]["prompt_tokens"] > 5_500
    assert answer["kv_cache"]["compressed_entries"] == 128
    assert len(waits) > 10
    assert max(waits) < 1.0


@pytest.mark.parametrize("is_stream", [False, True])
def test_client_that_leaves_frees_the_engine(url: str, is_stream: bool) -> None:
    """A client that goes away while its prompt is read ends the work; the next one is served."""
    body = {"prompt": prompt_of(26_500), "max_new_tokens": 64, "stream": is_stream}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/generate", json=body, timeout=httpx.Timeout(30, read=1.5))
    deadline = time.monotonic() + 10
    while running_sequences(url) > 0:
        assert time.monotonic() < deadline, "the abandoned prompt is still being read"
        time.sleep(0.1)
    assert generate(url, prompt="The capital of France is", max_new_tokens=4)["text"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stop": "e"},
        {"stop": [" th", "no such string"]},
        {"temperature": 0.9, "seed": 7, "top_p": 0.95},
        {"n": 2, "temperature": 1.0, "seed": 3},
    ],
    ids=str,
)
def test_stream_and_json_give_the_same_answer(url: str, fields: dict[str, Any]) -> None:
    """The pieces join to the text, and usage and report are those of the JSON answer."""
    request = {"prompt": prompt_of(1_200, 500), "max_new_tokens": 24, **KNOBS, **fields}
    whole = generate(url, **request)
    assert whole["kv_cache"]["compression_ratio"] > 1
    *pieces, last = stream(url, **request)
    texts = ["", ""]
    for piece in pieces:
        texts[piece.get("index", 0)] += piece["text"]
    expected = [choice["text"] for choice in whole.get("choices", [whole])]
    assert texts[: len(expected)] == expected
    assert last["text"] == ""
    for key in ("usage", "kv_cache", "finish_reason"):
        assert last[key] == whole[key]
    for stop in [fields.get("stop", [])] if isinstance(fields.get("stop"), str) else []:
        assert stop not in whole["text"]


def test_two_budgets_at_once_equal_their_solo_runs(url: str) -> None:
    """Concurrent requests with knobs of their own neither see nor change each other."""
    requests = [
        {"prompt": prompt_of(1_300, start), "max_new_tokens": 16, **KNOBS, **knobs}
        for start, knobs in ((0, {}), (3_000, {"max_capacity_prompt": 64}), (7_000, {"n": 2}))
    ]
    alone = [generate(url, **request) for request in requests]
    assert all(solo["kv_cache"]["compression_ratio"] > 1 for solo in alone)

    async def together() -> list[Any]:
        async with httpx.AsyncClient(base_url=url, timeout=600) as client:
            answers = await asyncio.gather(
                *(client.post("/generate", json=request) for request in requests)
            )
            return [answer.json() for answer in answers]

    for solo, crowded in zip(alone, asyncio.run(together()), strict=True):
        for key in ("text", "usage", "kv_cache", "finish_reason"):
            assert crowded[key] == solo[key]
    assert generate(url, **requests[0])["text"] == alone[0]["text"]


def test_openais_client_gets_the_answer_of_generate(url: str) -> None:
    """Both faces give one greedy answer and one report, whole and as a stream."""
    prompt = prompt_of(1_200, 500)
    whole = generate(url, prompt=prompt, max_new_tokens=16, **KNOBS)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        (model,) = client.models.list().data
        asked: dict[str, Any] = {"model": model.id, "prompt": prompt, "max_tokens": 16}
        asked |= {"temperature": 0, "extra_body": KNOBS}
        create: Any = client.completions.create  # its overloads know no arguments by mapping
        answer = create(**asked)
        usage = {"include_usage": True}
        chunks = list(create(**asked, stream=True, stream_options=usage))
    assert answer.choices[0].text == whole["text"]
    assert answer.choices[0].finish_reason == whole["finish_reason"]
    assert answer.usage.prompt_tokens == whole["usage"]["prompt_tokens"]
    assert answer.model_extra == {"kv_cache": whole["kv_cache"], "snapshot": "off"}
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole["text"]
    assert chunks[-1].usage == answer.usage
    assert chunks[-1].model_extra == {"kv_cache": whole["kv_cache"], "snapshot": "off"}


@pytest.mark.parametrize("is_stream", [False, True])
def test_late_request_is_ended_and_frees_the_engine(url: str, is_stream: bool) -> None:
    """A prompt that takes longer than its caller waits ends with 504, and the next is served."""
    body = {"prompt": prompt_of(26_500), "max_new_tokens": 64, "stream": is_stream}
    headers = {"X-Request-Timeout": "1.5"}
    answer = httpx.post(f"{url}/generate", json=body, headers=headers, timeout=60)
    assert answer.status_code == (200 if is_stream else 504)
    assert "deadline_exceeded" in answer.text
    assert answer.elapsed.total_seconds() < 30
    deadline = time.monotonic() + 10
    while running_sequences(url) > 0:
        assert time.monotonic() < deadline, "the late prompt is still being read"
        time.sleep(0.1)
    assert generate(url, prompt="The capital of France is", max_new_tokens=4)["text"]


def test_characters_are_never_cut(url: str) -> None:
    """Emoji and CJK characters, several tokens each, arrive whole in every piece."""
    prompt = "Repeat: 日本語 🎉 日本語 🎉 naïve\n日本語 🎉 日本語 🎉 naïve\n日本語 🎉"
    pieces = stream(url, prompt=prompt, max_new_tokens=40)
    assert any(ord(char) > 0x2FFF for char in "".join(piece["text"] for piece in pieces))
    assert all("\ufffd" not in piece["text"] for piece in pieces)


def test_server_ends_cleanly_when_told_to(tmp_path: Path) -> None:
    """SIGTERM lets a short answer finish, ends a long one with a 503, and exits with 0."""
    port = free_port()
    log = tmp_path / "server.log"
    environment = example_environment(tmp_path) | {
        "SNAPKV_PORT": str(port),
        "SNAPKV_SHUTDOWN_TIMEOUT_S": "20",
    }
    # Libraries may say something on standard error; standard output holds log lines only.
    with log.open("wb") as output, (tmp_path / "stderr.log").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "app", "serve"],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=errors,
        )
    try:
        wait_until_ready(process, f"127.0.0.1:{port}", log, 180)
        endless = {"prompt": "Once", "max_new_tokens": 2_000, "ignore_eos": True}
        late = ThreadPoolExecutor(1).submit(
            httpx.post, f"http://127.0.0.1:{port}/generate", json=endless, timeout=120
        )
        body = {"prompt": "Once upon a time", "max_new_tokens": 20, "stream": True}
        with httpx.stream(
            "POST", f"http://127.0.0.1:{port}/generate", json=body, timeout=120
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert "data: [DONE]" in rest
        assert late.result().status_code == 503
        assert late.result().json()["error"]["code"] == "engine_stopped"
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert "inference_complete" in {event["event"] for event in events}
