"""The `snapkv` command: what it prints, where, and how it exits."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.cli import commands
from app.main import create_app
from app.settings import Settings, load_settings
from snapkv_core import ModelLoadError
from tests.support.app_client import listening_in_thread, settings_for_tests
from tests.support.aws import moto_server, plain_client, use_aws
from tests.support.command import Command
from tests.support.fake_engine import FakeEngine
from tests.support.logs import captured_log


@pytest.fixture
def snapkv(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return the command; it leaves the process's logging alone and loads no model."""

    def fail_to_load(*_: Any) -> None:
        raise ModelLoadError("no weights")

    monkeypatch.setattr("app.cli.generate.configure_logging", lambda *_: None)
    monkeypatch.setattr("app.cli.local.Engine", SimpleNamespace(load=fail_to_load))
    return Command(monkeypatch, capsys)


@contextmanager
def served(**settings: Any) -> Iterator[str]:
    """Serve a fake engine from a thread, as the command blocks."""
    app = partial(create_app, settings_for_tests(**settings), FakeEngine())
    with listening_in_thread(app) as url:
        yield url


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """Keep the servers' logs out of what the command prints."""
    with captured_log():
        yield


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Serve for the whole file."""
    with served() as url:
        yield url


@pytest.mark.parametrize("how", ["--prompt", "--file", "stdin"])
def test_answer_goes_to_stdout_and_the_report_to_stderr(
    snapkv: Command, url: str, tmp_path: Path, how: str
) -> None:
    """A pipe gets the text alone, whichever way the prompt came in."""
    file = tmp_path / "prompt.txt"
    file.write_text("één two", encoding="utf-8")
    source = {
        "--prompt": ["--prompt", "één two"],
        "--file": ["--file", str(file)],
        "stdin": ["--file", "-"],
    }[how]
    status, out, err = snapkv("generate", *source, "--url", url, stdin="één two".encode())
    assert (status, out) == (0, " één two\n"), err
    assert "entries per layer and KV head" in err


def test_json_is_the_answer_of_the_http_route(snapkv: Command, url: str) -> None:
    """The whole answer is printed, every knob applied."""
    knobs = ["--max-capacity-prompt", "40", "--window-size", "8", "--kernel-size", "5"]
    more = ["--pooling", "avg", "--method", "snapkv", "--max-new-tokens", "2", "--seed", "1"]
    sampling = ["--temperature", "0.5", "--top-p", "0.9", "--top-k", "4", "--stop", "x"]
    prompt = ["--prompt", "w " * 80, "--json", "--url", f"{url}/"]
    status, out, err = snapkv("generate", *prompt, *knobs, *more, *sampling)
    assert status == 0, err
    answer = json.loads(out)
    assert answer["kv_cache"]["compression_ratio"] == 2.0
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "exactly one of"),
        (["--prompt", "a", "--file", "b"], "exactly one of"),
        (["--prompt", ""], "--prompt"),
        (["--file", "no-such-file"], "no-such-file: No such file"),
        (["--prompt", "a", "--window-size", "0"], "window_size"),
        (["--prompt", "a", "--temperature", "nan"], "--temperature"),
        (["--prompt", "a", "--profile", "x"], "profile"),
        (["--prompt", "a", "--model", "m", "--url", "http://x"], "--url"),
        (["--prompt", "a\udcff"], "Unicode"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(snapkv: Command, arguments: list[str], part: str) -> None:
    """Whoever typed it reads what to change, before any model is loaded."""
    status, out, err = snapkv("generate", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert part in err


def test_input_that_is_not_text_is_refused(snapkv: Command) -> None:
    """Binary on standard input is a mistake, not a prompt."""
    status, _, err = snapkv("generate", "--file", "-", stdin=b"\xff\xfe")
    assert (status, err.count("\n")) == (2, 1)


def test_key_for_a_server_comes_from_the_environment(
    snapkv: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is no setting of the service, and the key of OpenAI's own client is not sent."""
    key = "key-of-team-a-0123"
    monkeypatch.chdir(tmp_path)
    with served(api_keys=[key]) as url:
        ask = ("generate", "--prompt", "a b", "--url", url)
        monkeypatch.setenv("OPENAI_API_KEY", key)
        status, _, err = snapkv(*ask)
        assert status == 1
        assert "a known API key is needed" in err
        monkeypatch.setenv("SNAPKV_CLIENT_KEY", key)
        assert snapkv(*ask)[:2] == (0, " a b\n")
    load_settings(env_file=None)


def test_failures_exit_1(snapkv: Command, url: str) -> None:
    """What the user could not know is a failure, not wrong use."""
    for arguments, part in (
        ([], "no weights"),
        (["--url", "http://127.0.0.1:9"], "127.0.0.1:9"),
        (["--url", "nonsense"], "nonsense"),
        (["--url", f"{url}/health"], "not found"),
        (["--url", url, "--kernel-size", "4"], "kernel_size"),
    ):
        status, out, err = snapkv("generate", "--prompt", "a", *arguments)
        assert (status, out) == (1, ""), err
        assert part in err.splitlines()[-1]
        assert "Traceback" not in err


@pytest.mark.parametrize("port", ["70000", "-1", "x"])
def test_serve_refuses_bad_settings(snapkv: Command, port: str) -> None:
    """Nothing starts with a value that cannot work."""
    status, _, err = snapkv("serve", f"--port={port}")
    assert status == 2
    assert "Traceback" not in err


def test_serve_reads_the_secret_and_hands_on_how_to_read_it_again(
    snapkv: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options win over it at each reading; a secret that is not there ends the start."""
    given: dict[str, Any] = {}

    def take(settings: Settings, **options: Any) -> int:
        given.update(options, settings=settings)
        return 0

    monkeypatch.setattr(commands, "run_server", take)
    with moto_server() as url:
        use_aws(monkeypatch, url)
        monkeypatch.setenv("SNAPKV_SECRET_ID", "snapkv/of-the-command")
        status, out, err = snapkv("serve")
        assert (status, out) == (2, "")
        assert err.startswith("error: secret snapkv/of-the-command: there is no such secret")
        assert err.count("\n") == 1
        client = plain_client("secretsmanager", url)
        text = '{"model_name": "secret/model", "kernel_size": 5}'
        client.create_secret(Name="snapkv/of-the-command", SecretString=text)
        assert snapkv("serve", "--model", "option/model") == (0, "", "")
        assert (given["settings"].model, given["settings"].kernel_size) == ("option/model", 5)
        text = '{"model_name": "secret/model", "kernel_size": 7}'
        client.put_secret_value(SecretId="snapkv/of-the-command", SecretString=text)
        again = given["reload_settings"]()
        assert (again.model, again.kernel_size) == ("option/model", 7)
