"""`snapkv batch` as a process: killed and gone on with, and answers of the demo model."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.batch import completion, read_results, run_here, timeless, write_lines
from tests.support.fake_engine import FakeEngine
from tests.support.markdown import ROOT
from tests.support.served import example_environment, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_LINES = 200


def test_killed_run_goes_on_to_the_very_results_of_one_that_was_not(tmp_path: Path) -> None:
    """SIGKILL comes while lines are in flight; each line still has one result, in its place."""
    lines = [completion(f"id-{index}", "w " * (1 + index % 9)) for index in range(NUM_LINES)]
    lines[50], lines[120] = "nonsense", lines[119]
    requests = write_lines(tmp_path / "in.jsonl", lines)
    output, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    arguments = ["-m", "tests.support.fake_batch", str(requests), str(output), "0.02"]
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=example_environment(tmp_path),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not output.exists() or output.read_bytes().count(b"\n") < 60:
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    written = output.read_bytes()
    assert 60 <= written.count(b"\n") < NUM_LINES
    engine = FakeEngine()
    assert run_here(engine, requests, output) == 3
    assert run_here(FakeEngine(), requests, whole) == 3
    kept = written[: written.rindex(b"\n") + 1]
    assert output.read_bytes().startswith(kept)
    assert timeless(output.read_bytes()) == timeless(whole.read_bytes())
    assert len(engine.requests) <= NUM_LINES - kept.count(b"\n")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of the commands."""
    return example_environment(tmp_path_factory.mktemp("environment"))


@pytest.fixture(scope="module")
def url(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the demo model."""
    with serving(environment, tmp_path_factory.mktemp("served") / "server.log") as address:
        yield f"http://{address}"


@pytest.mark.demo
def test_answers_are_those_that_openais_client_gets(
    url: str, environment: dict[str, str], tmp_path: Path
) -> None:
    """Greedy answers of a model that is loaded for the batch, several in flight at once."""
    manual = (ROOT / "examples" / "handbook.txt").read_text(encoding="utf-8")
    knobs = {"max_capacity_prompt": 64, "window_size": 16, "kernel_size": 7, "pooling": "max"}
    shared: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 8}
    prompts = [manual[start : start + 500] for start in range(0, 2_000, 500)]
    message = {"role": "user", "content": "What is the capital of France?"}
    lines = [
        {
            "custom_id": f"completion-{index}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {**shared, **knobs, "prompt": prompt},
        }
        for index, prompt in enumerate(prompts)
    ]
    chat = {"method": "POST", "url": "/v1/chat/completions"}
    lines.append({"custom_id": "chat", **chat, "body": {**shared, "messages": [message]}})
    requests = write_lines(tmp_path / "in.jsonl", map(json.dumps, lines))
    output = tmp_path / "out.jsonl"
    done = subprocess.run(
        ["snapkv", "batch", str(requests), str(output)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "lines done" in done.stderr
    bodies = [result["response"]["body"] for result in read_results(output)]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for prompt, body in zip(prompts, bodies, strict=False):
            create: Any = client.completions.create  # its overloads know no arguments by mapping
            answer = create(prompt=prompt, extra_body=knobs, **shared)
            assert body["choices"] == answer.model_dump()["choices"]
            assert body["usage"]["prompt_tokens"] == answer.usage.prompt_tokens
            assert body["kv_cache"] == answer.model_extra["kv_cache"]
            assert body["kv_cache"]["compressed_entries"] == 64
        create = client.chat.completions.create
        said = create(messages=[message], **shared).choices[0].message.content
    assert bodies[-1]["choices"][0]["message"]["content"] == said
    assert "Paris" in said
