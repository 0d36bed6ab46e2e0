"""`snapkv generate`: one prompt here or on a server, a progress bar, a readable report."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from app.api.schemas.generate import GenerateRequest, GenerateResponse
from app.cli.local import generate_here
from app.cli.remote import generate_there
from app.settings import load_settings
from app.telemetry.logging import configure_logging

STDIN: Final = Path("-")


class CommandError(Exception):
    """The command was called wrongly; the message says how."""


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """What to generate and where.

    Attributes:
        fields: Fields of `POST /generate` that were given.
        url: Server to ask; None loads the model in this process.
        model: Model to load; None takes the setting.
        as_json: Print the answer as JSON instead of text and a report.
        api_key: Key for that server; None sends none.
    """

    fields: Mapping[str, Any]
    url: str | None
    model: str | None
    as_json: bool
    api_key: str | None = None


def read_prompt(file: Path | None, prompt: str | None) -> str:
    """Return the prompt from wherever it was given.

    Raises:
        CommandError: Neither or both were given, or the file cannot be read as UTF-8 text.
    """
    if (file is None) == (prompt is None):
        raise CommandError("give exactly one of --file and --prompt")
    if prompt is not None:
        return prompt
    assert file is not None, "one of the two is given"
    try:
        raw = sys.stdin.buffer.read() if file == STDIN else file.read_bytes()
        return raw.decode("utf-8")
    except OSError as error:
        raise CommandError(f"--file: {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CommandError(f"--file: {file} is not UTF-8 text") from None


def run_generate(options: GenerateOptions) -> None:
    """Generate, print the answer on standard output and the rest on standard error.

    Raises:
        CommandError: An option's value is not acceptable, or options exclude each other.
        SettingsError: The environment holds a value that is not acceptable.
        SnapKVError: The model cannot be loaded, or refuses or fails this prompt.
    """
    if options.url is not None and options.model is not None:
        raise CommandError("--model is for loading here; a server named by --url has its own")
    try:
        body = GenerateRequest(**options.fields)
    except ValidationError as error:
        raise CommandError("; ".join(_problems(error))) from None
    console = Console(stderr=True)
    if options.url is not None:
        response = generate_there(options.url, options.fields, console, options.api_key)
    else:
        settings = load_settings({"model": options.model})
        configure_logging("warning", sys.stderr)
        response = generate_here(body, settings, console)
    if options.as_json:
        sys.stdout.write(response.model_dump_json(exclude_unset=True) + "\n")
        return
    # A terminal that cannot show a character gets its escape instead of a traceback.
    encoding = sys.stdout.encoding or "utf-8"
    text = response.text.encode(encoding, "backslashreplace").decode(encoding)
    sys.stdout.write(text + "\n")
    console.print(_report(response))


def _problems(error: ValidationError) -> list[str]:
    return [
        f"--{str(detail['loc'][0]).replace('_', '-')}: {detail['msg']}"
        if detail["loc"]
        else detail["msg"]
        for detail in error.errors(include_url=False)
    ]


def _report(response: GenerateResponse) -> Table:
    usage, timings, cache = response.usage, response.timings, response.kv_cache
    # A Text, since the server's words are no markup of ours.
    title = Text(f"{response.model}, finished: {response.finish_reason}")
    table = Table(title=title, show_header=False)
    table.add_row("tokens", f"{usage.prompt_tokens:,} read, {usage.completion_tokens:,} generated")
    if cache is not None:
        entries = f"{cache.original_entries:,} -> {cache.compressed_entries:,.0f}"
        size = f"{_mib(cache.original_bytes)} -> {_mib(cache.compressed_bytes)}"
        table.add_row("method", cache.method)
        table.add_row("entries per layer and KV head", entries)
        table.add_row("KV cache", f"{size}, {cache.compression_ratio:.1f} times smaller")
        table.add_row("attention mass kept", f"{cache.kept_attention_mass:.1%}")
        if cache.skipped is not None:
            table.add_row("compression skipped", cache.skipped)
    table.add_row("time to first token", f"{timings.time_to_first_token_ms / 1e3:.2f} s")
    num_gaps = max(1, usage.completion_tokens - 1)
    table.add_row("time per further token", f"{timings.decode_ms / num_gaps:.0f} ms")
    table.add_row("total", f"{timings.total_ms / 1e3:.2f} s")
    return table


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
