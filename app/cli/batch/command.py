"""`snapkv batch`: from two file names to an exit status."""

import asyncio
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final

from rich.console import Console

from app.cli.batch.figures import BatchProgress
from app.cli.batch.lines import RawLine, SeenIds, read_lines
from app.cli.batch.results import ResultFile
from app.cli.batch.runner import BatchRunner
from app.cli.batch.service import Service, service_here, service_there
from app.cli.generate import CommandError
from app.main import LoadEngine
from app.settings import Settings, load_settings
from app.telemetry.logging import configure_logging
from snapkv_core import AsyncEngine

DEFAULT_CONCURRENCY: Final = 16
MAX_CONCURRENCY: Final = 1_024

#: Every line has a result, and some of them are errors.
SOME_FAILED: Final = 3
#: As shells number what a signal has ended.
_SIGNAL_BASE: Final = 128


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """What to answer and where.

    Attributes:
        requests: File of requests, one a line.
        results: File that gets their results.
        url: Server to ask; None loads the model in this process.
        model: Model to load; None takes the setting.
        concurrency: Lines in flight at that server; None takes the default.
        api_key: Key for that server; None sends none.
    """

    requests: Path
    results: Path
    url: str | None = None
    model: str | None = None
    concurrency: int | None = None
    api_key: str | None = None


def run_batch(options: BatchOptions, load_engine: LoadEngine = AsyncEngine.load) -> int:
    """Answer every line that has no result yet, and tell how it went on standard error.

    Args:
        options: What and where.
        load_engine: Loads the engine; blocking.

    Returns:
        The exit status: 0 when every line is answered, `SOME_FAILED` when some of the results are
        errors, 128 and the number of the signal that ended the run.

    Raises:
        CommandError: Options exclude each other, or a file is not what it must be.
        SettingsError: The environment holds a value that is not acceptable.
        SnapKVError: The run cannot go on; what was answered is written.
    """
    _require_consistent(options)
    settings = load_settings({"model": options.model})
    configure_logging("warning", sys.stderr)
    with (
        _opened(options.requests) as requests,
        closing(ResultFile(options.results)) as results,
        closing(SeenIds()) as seen,
    ):
        about = os.fstat(requests.fileno())
        if results.is_same_file(about):
            raise CommandError("requests and results must be two files")
        ending, progress = _Ending(), BatchProgress(Console(stderr=True), about.st_size)
        with progress:
            lines = _unanswered(requests, results, seen, progress, settings.max_body_bytes)
            try:
                if (first := next(lines, None)) is not None:
                    service = _service(options, settings, ending.event, load_engine)
                    runner = BatchRunner(results, seen, progress)
                    asyncio.run(_run(runner, service, chain([first], lines), ending, progress))
            except asyncio.CancelledError:
                pass  # by the second signal
            finally:
                progress.finish()
    if ending.signal_number is not None:
        return _SIGNAL_BASE + ending.signal_number
    return SOME_FAILED if progress.everything.num_failed else 0


def _require_consistent(options: BatchOptions) -> None:
    if options.url is not None and options.model is not None:
        raise CommandError("--model is for loading here; a server named by --url has its own")
    if options.url is None and options.concurrency is not None:
        raise CommandError("--concurrency is for --url; an engine here takes as many as it holds")
    if options.concurrency is not None and not 1 <= options.concurrency <= MAX_CONCURRENCY:
        raise CommandError(f"--concurrency: must be from 1 to {MAX_CONCURRENCY}")


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        # A pipe would make the command wait for whoever writes to it.
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            raise CommandError(f"{path}: must be a file, which a later run can read again")
        file = path.open("rb")
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None
    with file:
        yield file


def _unanswered(
    requests: BinaryIO,
    results: ResultFile,
    seen: SeenIds,
    progress: BatchProgress,
    max_body_bytes: int,
) -> Iterator[RawLine]:
    """Return the lines that have no result yet."""

    def on_kept(record: Mapping[str, Any], end: int) -> None:
        progress.on_kept(record, end)
        if isinstance(custom_id := record.get("custom_id"), str):
            seen.add(custom_id)

    position = results.keep_finished(read_lines(requests, max_body_bytes), on_kept)
    requests.seek(position.offset)
    return read_lines(requests, max_body_bytes, num_before=position.num_lines)


def _service(
    options: BatchOptions, settings: Settings, ending: asyncio.Event, load_engine: LoadEngine
) -> AbstractAsyncContextManager[Service]:
    if options.url is None:
        return service_here(settings, ending, load_engine)
    concurrency = options.concurrency or DEFAULT_CONCURRENCY
    return service_there(options.url, options.api_key, concurrency, ending)


async def _run(
    runner: BatchRunner,
    service: AbstractAsyncContextManager[Service],
    lines: Iterator[RawLine],
    ending: "_Ending",
    progress: BatchProgress,
) -> None:
    with ending.by_signals(progress.tell):
        async with service as ready:
            progress.on_started()
            await runner.run(ready, lines)


class _Ending:
    """Ends a run when the process is told to: the first signal lets what is in flight finish."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self.event = asyncio.Event()

    @contextmanager
    def by_signals(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Take SIGINT and SIGTERM; the second one cancels the task that runs this."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "runs in a task"

        def on_signal(number: int) -> None:
            if self.event.is_set():
                task.cancel()
                return
            self.signal_number = number
            self.event.set()
            tell("ending with what is in flight; the same again ends at once")

        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, partial(on_signal, number))
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
