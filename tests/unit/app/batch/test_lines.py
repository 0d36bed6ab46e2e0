"""What becomes of each line: answered as the server answers, or an error of its own."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.main import create_app
from tests.support.app_client import listening_in_thread, settings_for_tests
from tests.support.batch import (
    codes_of,
    completion,
    envelope,
    read_results,
    run_here,
    texts_of,
    write_lines,
)
from tests.support.fake_engine import FakeEngine

BODY = {"model": "fake", "prompt": "a b", "max_tokens": 2}


def run_lines(folder: Path, *lines: str) -> list[dict[str, Any]]:
    """Run lines between two good ones, which must be answered; return the results of the rest."""
    around = [completion("first", "one two"), *lines, completion("last", "three")]
    output = folder / "out.jsonl"
    run_here(FakeEngine(), write_lines(folder / "in.jsonl", around), output)
    first, *rest, last = read_results(output)
    assert texts_of([first, last]) == [" one two", " three"]
    return rest


def test_result_has_the_fields_of_openais_batches(tmp_path: Path) -> None:
    (result,) = run_lines(tmp_path, completion("é 日本", "a b", max_tokens=2))
    assert list(result) == ["id", "custom_id", "response", "error"]
    assert result["id"].startswith("batch_req_")
    assert (result["custom_id"], result["error"]) == ("é 日本", None)
    assert list(result["response"]) == ["status_code", "request_id", "body"]
    assert result["response"]["status_code"] == 200
    body = result["response"]["body"]
    assert body["object"] == "text_completion"
    assert result["response"]["request_id"] == body["id"]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    assert body["kv_cache"]["compression_ratio"] == 1.0


def test_conversations_are_answered_as_well(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hello you"}]
    body = {"model": "fake", "messages": messages}
    line = envelope(custom_id="chat", url="/v1/chat/completions", body=body)
    (result,) = run_lines(tmp_path, line)
    assert result["response"]["body"]["choices"][0]["message"]["content"] == " hello you"


@pytest.mark.parametrize(
    ("line", "code", "custom_id", "part"),
    [
        ("nonsense", "invalid_json", None, "line 2: is not JSON"),
        ("[" * 50_000, "invalid_json", None, "nested too deeply"),
        ('{"custom_id": "a", "custom_id": "b"}', "invalid_json", None, "twice"),
        ("[]", "invalid_line", None, "must be a JSON object"),
        ("null", "invalid_line", None, "must be a JSON object"),
        ("{}", "invalid_line", None, "custom_id: is missing; method: is missing"),
        (envelope(body=BODY), "invalid_line", None, "custom_id: is missing"),
        (envelope(custom_id=7, body=BODY), "invalid_line", None, "custom_id"),
        (envelope(custom_id="", body=BODY), "invalid_line", None, "custom_id"),
        (envelope(custom_id="\ud800", body=BODY), "invalid_line", None, "Unicode"),
        (envelope(custom_id="x"), "invalid_line", "x", "body: is missing"),
        (envelope(custom_id="x", body=[]), "invalid_line", "x", "body"),
        (envelope(custom_id="x", body=BODY, method="GET"), "invalid_line", "x", "'POST'"),
        (envelope(custom_id="x", body=BODY, url="/v1/embeddings"), "invalid_line", "x", "url"),
        (envelope(custom_id="x", body=BODY, note=1), "invalid_line", "x", "note: unknown field"),
        (
            envelope(custom_id="x", body={**BODY, "stream": True}),
            "stream_not_supported",
            "x",
            "body.stream",
        ),
        (envelope(custom_id="first", body=BODY), "duplicate_custom_id", "first", "line 2"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_line_that_cannot_be_sent_is_an_error_of_its_own(
    tmp_path: Path, line: str, code: str, custom_id: str | None, part: str
) -> None:
    """The lines around it are answered."""
    (result,) = run_lines(tmp_path, line)
    assert result["response"] is None
    assert result["custom_id"] == custom_id
    assert result["error"]["code"] == code
    assert part in result["error"]["message"]


def test_bytes_that_are_no_text_are_an_error_of_their_line(tmp_path: Path) -> None:
    requests, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_bytes(b'{"custom_id": "\xff"}\n' + completion("last", "three").encode())
    assert run_here(FakeEngine(), requests, output) == 3
    assert codes_of(read_results(output)) == ["invalid_json", 200]


def test_blank_lines_and_a_missing_line_end_are_no_errors(tmp_path: Path) -> None:
    requests, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text(f"\n \r\n{completion('a', 'one')}\r\n\n{completion('b', 'two')}")
    assert run_here(FakeEngine(), requests, output) == 0
    assert texts_of(read_results(output)) == [" one", " two"]


def test_stream_that_is_false_or_null_is_no_stream(tmp_path: Path) -> None:
    lines = [completion(str(value), "a", stream=value) for value in (False, None)]
    assert codes_of(run_lines(tmp_path, *lines)) == [200, 200]


def test_refused_body_gets_the_servers_answer(tmp_path: Path) -> None:
    """Status and body are those of the route over HTTP, to the letter."""
    bodies: list[dict[str, Any]] = [
        {**BODY, "kernel_size": 4},
        {**BODY, "max_tokens": 10_000},
        {**BODY, "temperature": float("nan")},
        {**BODY, "seed": 10**400},
        {**BODY, "max_capacity": 512},
        {**BODY, "prompt": "\ud800"},
        {**BODY, "prompt": "w " * 3_000},
        {**BODY, "model": "another"},
        {**BODY, "stream": "yes"},
        {**BODY, "stream_options": {}},
        {"model": "fake"},
        {},
    ]
    lines = [envelope(custom_id=str(index), body=body) for index, body in enumerate(bodies)]
    results = run_lines(tmp_path, *lines)
    app = partial(create_app, settings_for_tests(), FakeEngine())
    headers = {"Content-Type": "application/json"}
    with listening_in_thread(app) as url, httpx.Client(base_url=url, headers=headers) as client:
        for body, result in zip(bodies, results, strict=True):
            answer = client.post("/v1/completions", content=json.dumps(body))
            assert answer.status_code >= 400
            assert result["response"]["status_code"] == answer.status_code
            assert result["response"]["body"] == answer.json()
            assert result["error"] is None


def test_long_lines_are_refused_without_being_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body over the server's limit gets its 413; a line over any limit is not even parsed."""
    monkeypatch.setenv("SNAPKV_MAX_BODY_BYTES", "2000")
    at_limit = completion("fits", "x" * 1_800)
    too_large = completion("large", "x" * 2_000)
    far_too_long = completion("longest", "x" * 3_000_000)
    results = run_lines(tmp_path, at_limit, too_large, far_too_long, completion("after", "y"))
    assert codes_of(results) == [200, 413, "line_too_long", 200]


def test_text_beyond_ascii_counts_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body does not grow over the limit by escapes that it did not have."""
    monkeypatch.setenv("SNAPKV_MAX_BODY_BYTES", "2000")
    body = {"model": "fake", "prompt": "日" * 600}
    line = json.dumps({**json.loads(envelope(custom_id="x")), "body": body}, ensure_ascii=False)
    (result,) = run_lines(tmp_path, line)
    assert texts_of([result]) == [" " + "日" * 600]
