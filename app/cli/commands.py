"""Commands and options of `snapkv`; what they do is in the modules beside this one."""

from functools import partial
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli.batch.command import DEFAULT_CONCURRENCY, BatchOptions, run_batch
from app.cli.cost import cost_app
from app.cli.generate import CommandError, GenerateOptions, read_prompt, run_generate
from app.cli.server import run_server
from app.cli.settings_doc import settings_table
from app.cli.snapshots import snapshots_app
from app.cli.weights import app as weights
from app.integrations.aws.secrets import SecretReader
from app.settings import CLIENT_KEY, SettingsError, load_settings
from snapkv_core import (
    COMPRESSION_METHODS,
    POOLINGS,
    PROFILES,
    InvalidParameterError,
    SnapKVError,
    ensure_demo_model,
)

app = typer.Typer(
    name="snapkv",
    help="LLM inference with a KV-cache budget per request.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(cost_app, name="cost")
app.add_typer(snapshots_app, name="snapshots")
app.add_typer(weights, name="weights")


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on [SNAPKV_HOST].")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on [SNAPKV_PORT].")] = None,
    model: Annotated[str | None, typer.Option(help="Model to serve [SNAPKV_MODEL].")] = None,
) -> None:
    """Serve over HTTP; every setting is a SNAPKV_ variable (docs/settings.md)."""
    given = {"host": host, "port": port, "model": model}
    load = partial(load_settings, given, read_secret=SecretReader().read)
    raise typer.Exit(run_server(load(), reload_settings=load))


@app.command()
def generate(
    file: Annotated[
        Path | None, typer.Option(help="File with the prompt, UTF-8; - is standard input.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt itself.")] = None,
    url: Annotated[
        str | None, typer.Option(help="Server to ask; without it the model is loaded here.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model to load here [SNAPKV_MODEL].")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest answer in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Likeliest tokens that compete.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the answer.")] = None,
    max_capacity_prompt: Annotated[
        int | None, typer.Option(help="Prompt tokens kept per layer and KV head.")
    ] = None,
    window_size: Annotated[
        int | None, typer.Option(help="Last prompt tokens, which score the rest.")
    ] = None,
    kernel_size: Annotated[int | None, typer.Option(help="Width of the pooling, odd.")] = None,
    pooling: Annotated[str | None, typer.Option(help=f"{' or '.join(POOLINGS)}.")] = None,
    method: Annotated[str | None, typer.Option(help=f"{' or '.join(COMPRESSION_METHODS)}.")] = None,
    profile: Annotated[
        str | None, typer.Option(help=f"Named set of knobs: {', '.join(PROFILES)}.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the answer as POST /generate gives it.")
    ] = False,
    api_key: Annotated[
        str | None,
        typer.Option(envvar=CLIENT_KEY, help="Key for --url; better in the environment."),
    ] = None,
) -> None:
    """Continue one prompt and report what compressing its KV cache did."""
    fields: dict[str, Any] = {
        "prompt": read_prompt(file, prompt),
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": stop or None,
        "max_capacity_prompt": max_capacity_prompt,
        "window_size": window_size,
        "kernel_size": kernel_size,
        "pooling": pooling,
        "method": method,
        "profile": profile,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    run_generate(GenerateOptions(given, url=url, model=model, as_json=as_json, api_key=api_key))


@app.command()
def batch(
    requests: Annotated[
        Path, typer.Argument(help="Requests, one a line, as OpenAI's batches have them.")
    ],
    results: Annotated[
        Path, typer.Argument(help="Gets their results in the same order; a run goes on from it.")
    ],
    url: Annotated[
        str | None, typer.Option(help="Server to ask; without it the model is loaded here.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model to load here [SNAPKV_MODEL].")] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(help=f"Lines in flight at --url, {DEFAULT_CONCURRENCY} unless set."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar=CLIENT_KEY, help="Key for --url; better in the environment."),
    ] = None,
) -> None:
    """Answer a file of requests, and go on with it where an earlier run was ended.

    Exit status: 0, every line is answered; 3, some results are errors; 1, it could not go on; 2,
    it was called wrongly; 130 or 143, it was ended by a signal.
    """
    options = BatchOptions(requests, results, url, model, concurrency, api_key)
    raise typer.Exit(run_batch(options))


@app.command("demo-model")
def demo_model() -> None:
    """Fetch and convert the demo model ahead of its first use, unless it is there."""
    typer.echo(f"demo model ready in {ensure_demo_model(load_settings().cache_dir)}")


@app.command("settings-doc")
def settings_doc() -> None:
    """Print the table of all settings, as in docs/settings.md."""
    typer.echo(settings_table(), nl=False)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(package_version("snapkv-inference"))


def run() -> None:
    """Run the command; errors are one line on standard error and an exit status.

    1 means that it failed, 2 that it was called wrongly or the settings are not acceptable.
    """
    try:
        app()
    except (SettingsError, CommandError, InvalidParameterError) as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(2) from None
    except SnapKVError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(1) from None
