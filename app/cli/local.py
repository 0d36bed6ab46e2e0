"""Generates in this process, with a bar for reading the prompt and for writing the answer."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from app.api.schemas.generate import GenerateRequest, GenerateResponse, to_response
from app.integrations.aws.weights.models import S3Models, s3_models
from app.integrations.aws.weights.progress import TransferProgress
from app.services.answers import ChoiceResult, GenerationResult
from app.services.inputs import to_request
from app.settings import Settings
from snapkv_core import CompressionReport, Engine, GenerationFailedError, RequestSummary, StepStats

_REQUEST_ID = "cli"


class _Bars:
    """Shows an engine's steps."""

    def __init__(self, progress: Progress, reading: TaskID, writing: TaskID) -> None:
        self._progress = progress
        self._reading = reading
        self._writing = writing

    def on_prompt_compressed(self, request_id: str, report: CompressionReport) -> None:
        """Begin the second bar; the first token comes with the end of reading."""
        self._progress.update(self._writing, advance=1, visible=True)

    def on_request_finished(self, summary: RequestSummary) -> None:
        """Fill the second bar: an answer may end early."""
        self._progress.update(self._writing, completed=summary.num_output_tokens)

    def on_step(self, step: StepStats) -> None:
        """Move both bars."""
        self._progress.update(self._reading, advance=step.num_prefill_tokens)
        self._progress.update(self._writing, advance=step.num_decoded)


def generate_here(body: GenerateRequest, settings: Settings, console: Console) -> GenerateResponse:
    """Load the model and answer one request.

    Raises:
        SnapKVError: The model cannot be loaded, or refuses or fails this prompt.
    """
    # Before the model is loaded, which takes far longer than saying what is wrong.
    request = to_request(_REQUEST_ID, body.to_input(), settings.default_compression())
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        loading = progress.add_task("loading the model", total=None)
        engine = Engine.load(_s3_models(settings, progress).localise(settings.to_engine_config()))
        progress.update(loading, total=1, completed=1)
        group = engine.prepare(request)
        num_tokens = group[0].num_prompt_tokens
        reading = progress.add_task(f"reading {num_tokens:,} tokens", total=num_tokens)
        writing = progress.add_task("writing", total=group[0].max_new_tokens, visible=False)
        engine.observer = _Bars(progress, reading, writing)
        engine.add(request, group)
        text, summary = _run(engine)
    choice = ChoiceResult(0, text, summary.finish_reasons[0])
    return to_response(GenerationResult(_REQUEST_ID, engine.spec.name, (choice,), (summary,)))


def _s3_models(settings: Settings, progress: Progress) -> S3Models:
    downloading = progress.add_task("downloading the weights", visible=False)

    def on_progress(state: TransferProgress) -> None:
        progress.update(
            downloading, total=state.total_bytes, completed=state.done_bytes, visible=True
        )

    return s3_models(settings.weights_cache_dir, settings.weights_cache_max_bytes, on_progress)


def _run(engine: Engine) -> tuple[str, RequestSummary]:
    pieces: list[str] = []
    while True:
        for event in engine.step():
            pieces.append(event.text)
            if event.error is not None:
                raise GenerationFailedError(event.error)
            if event.summary is not None:
                return "".join(pieces), event.summary
