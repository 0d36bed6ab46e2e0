"""`snapkv weights`: store a model in S3, fetch it, compare a folder with its manifest."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from app.integrations.aws.weights.cache import WeightsCache
from app.integrations.aws.weights.folder import list_model_files, verify_folder
from app.integrations.aws.weights.location import S3Location
from app.integrations.aws.weights.manifest import Manifest
from app.integrations.aws.weights.progress import ProgressCallback, TransferProgress
from app.integrations.aws.weights.pull import Puller, default_client, make_client
from app.integrations.aws.weights.push import MAX_PARALLEL, Pusher, PushPlan
from app.settings import load_settings
from app.telemetry.logging import configure_logging

app = typer.Typer(help="Weights in S3: push, pull, verify.", no_args_is_help=True)

_URL_HELP: Final = "Where the model lies, s3://bucket/prefix."
_Folder = Annotated[Path, typer.Argument(help="Folder of the model.")]
_Url = Annotated[str, typer.Argument(help=_URL_HELP)]


@app.command()
def push(
    folder: _Folder,
    url: _Url,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be uploaded, and change nothing.")
    ] = False,
) -> None:
    """Mirror a local model to S3, its manifest last; what is there already is not sent again."""
    location = S3Location.parse(url)
    console = _prepare_output()
    pusher = Pusher(make_client(default_client, MAX_PARALLEL), folder, location)
    num_bytes = sum(size for size, _ in list_model_files(folder).values())
    with _bar(console, "hashing", num_bytes) as progress:
        plan = pusher.plan(on_bytes=lambda more: progress.advance(progress.task_ids[0], more))
    _print_plan(plan, location, is_dry_run=dry_run)
    if not dry_run:
        with _bar(console, "uploading", plan.upload_bytes) as progress:
            pusher.push(plan, lambda more: progress.advance(progress.task_ids[0], more))
    _print_result(location, plan.manifest)


@app.command()
def pull(
    url: _Url,
    to: Annotated[
        Path | None,
        typer.Option(help="Folder to fetch into; without it the cache [SNAPKV_WEIGHTS_CACHE_DIR]."),
    ] = None,
) -> None:
    """Fetch a model from S3, in parts that are checked one by one; goes on where it was cut off."""
    location = S3Location.parse(url)
    console = _prepare_output()
    with showing_downloads(console) as on_progress:
        puller = Puller(on_progress)
        if to is not None:
            fingerprint, folder = puller.to_folder(location, to).fingerprint, to
        else:
            settings = load_settings()
            cache = WeightsCache(settings.weights_cache_dir, settings.weights_cache_max_bytes)
            held = puller.to_cache(location, cache)
            fingerprint, folder = held.fingerprint, held.folder
    typer.echo(f"{folder}\nweights_fingerprint {fingerprint}")


@app.command()
def verify(folder: _Folder) -> None:
    """Compare every byte of a folder with the manifest in it."""
    console = _prepare_output()
    num_bytes = sum(size for size, _ in list_model_files(folder).values())
    with _bar(console, "verifying", num_bytes) as progress:
        manifest = verify_folder(folder, lambda more: progress.advance(progress.task_ids[0], more))
    _print_result(folder, manifest)


@contextmanager
def showing_downloads(console: Console) -> Iterator[ProgressCallback]:
    """Show a bar while a model is fetched, once it is known how large it is."""
    with _progress(console) as progress:
        tasks: list[TaskID] = []

        def on_progress(state: TransferProgress) -> None:
            if not tasks:
                tasks.append(progress.add_task("downloading", total=state.total_bytes))
            progress.update(tasks[0], completed=state.done_bytes)

        yield on_progress


@contextmanager
def _bar(console: Console, what: str, num_bytes: int) -> Iterator[Progress]:
    with _progress(console) as progress:
        progress.add_task(what, total=num_bytes)
        yield progress


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        # Without a terminal there are log lines.
        disable=not console.is_terminal,
    )


def _prepare_output() -> Console:
    """Send the log to standard error: less of it beside a bar, which needs the terminal."""
    console = Console(stderr=True)
    configure_logging("warning" if console.is_terminal else "info", sys.stderr)
    return console


def _print_plan(plan: PushPlan, location: S3Location, *, is_dry_run: bool) -> None:
    would = "would upload" if is_dry_run else "uploading"
    for file in plan.uploads:
        typer.echo(f"{would} {location.url_of(file.name)} ({file.size:,} bytes)")
    num_kept = len(plan.manifest.files) - len(plan.uploads)
    if num_kept:
        typer.echo(f"{num_kept} files are there already")


def _print_result(where: S3Location | Path, manifest: Manifest) -> None:
    size = f"{len(manifest.files)} files, {manifest.total_bytes:,} bytes"
    typer.echo(f"{where}: {size}\nweights_fingerprint {manifest.fingerprint}")
