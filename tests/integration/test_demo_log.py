"""With a real model at debug level, no text of prompts or answers is in the server's output."""

from pathlib import Path

import httpx
import pytest

from tests.support.served import example_environment, serving

SECRET = "tangerine"
PROMPT = f"The {SECRET} grows in the garden of my grandmother. " * 60


@pytest.mark.slow
@pytest.mark.demo
def test_no_text_is_in_the_output_of_the_real_server(tmp_path: Path) -> None:
    """Engine, tokenizer, model library and server together; standard error is looked at too."""
    log = tmp_path / "server.log"
    environment = example_environment(tmp_path) | {"SNAPKV_LOG_LEVEL": "debug"}
    with (
        serving(environment, log) as address,
        httpx.Client(base_url=f"http://{address}", timeout=120) as client,
    ):
        body = {"prompt": PROMPT, "max_new_tokens": 24, "temperature": 0}
        answer = client.post("/generate", json=body | {"explain": True})
        assert answer.status_code == 200, answer.text
        chat = {"messages": [{"role": "user", "content": PROMPT}], "max_new_tokens": 8}
        assert client.post("/generate", json=chat | {"stream": True}).status_code == 200
        assert client.post("/generate", json=body | {"stop": SECRET, SECRET: 1}).status_code == 422
    output = log.read_text(encoding="utf-8")
    assert output.count('"event": "kv_cache_compressed"') == 2
    assert SECRET not in output
    words = answer.json()["text"].split()
    assert len(words) > 4
    assert " ".join(words[:4]) not in output
