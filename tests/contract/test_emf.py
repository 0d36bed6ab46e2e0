"""Metrics as log lines: what CloudWatch reads of them, and that nothing else depends on them."""

import io
import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from pydantic import ValidationError

from app.records import GenerationRecord
from app.telemetry.emf import DIMENSIONS, UNITS, EmfMetrics
from snapkv_core import CompressionConfig, EngineStats, FinishReason, RequestTimings
from tests.support.app_client import fake_service, until
from tests.support.emf import EmfLine, emf_lines, read_emf
from tests.support.fake_engine import FakeEngine
from tests.support.logs import captured_log
from tests.support.markdown import ROOT


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Capture every line that an ordinary service writes."""
    with captured_log("info") as stream:
        yield stream


def of_generations(log: io.StringIO) -> list[EmfLine]:
    """Read the lines about generations."""
    return [line for line in emf_lines(log.getvalue()) if "Latency" in line.values]


def of_engine(log: io.StringIO) -> list[EmfLine]:
    """Read the lines about the engine."""
    return [line for line in emf_lines(log.getvalue()) if "Load" in line.values]


def record_with(**values: object) -> GenerationRecord:
    """Return the record of a request that failed before its first token."""
    fields: dict[str, object] = {
        "request_id": "r-1",
        "trace_id": None,
        "model": "m",
        "started_at": datetime.now(UTC),
        "num_choices": 1,
        "num_prompt_tokens": 7,
        "num_output_tokens": 0,
        "finish_reason": FinishReason.ERROR,
        "knobs": CompressionConfig(),
        "compression": None,
        "timings": None,
        "duration_ms": 12.5,
        "time_to_first_token_ms": None,
    }
    return GenerationRecord(**(fields | values))  # type: ignore[arg-type]  # right by construction


@pytest.mark.parametrize("stream", [False, True])
async def test_generation_becomes_metrics(log: io.StringIO, stream: bool) -> None:
    """One line holds what alarms are set on, under dimensions that do not grow."""
    async with fake_service(FakeEngine(), service_name="chat") as client:
        body = {"prompt": "w " * 1_024, "max_new_tokens": 3, "stream": stream}
        await client.post("/generate", json=body, headers={"X-Request-Id": "r-1"})
    (line,) = of_generations(log)
    assert line.namespace == "SnapKV"
    assert line.dimensions == {"Service": "chat", "Model": "fake"}
    assert line.values == {
        "Latency": 51.0,
        "QueueTime": 1.0,
        "TimeToFirstToken": 21.0,
        "InputTokens": 1_024,
        "OutputTokens": 3,
        "Errors": 0,
        "CompressionRatio": 2.0,
        "KeptAttentionMass": 0.9,
    }
    assert line.units["Latency"] == "Milliseconds"
    assert line.line["request_id"] == "r-1"
    assert line.line["event"] == "generation_metrics"


async def test_prompt_that_was_kept_whole_has_no_ratio(log: io.StringIO) -> None:
    """A ratio of 1 for each short prompt would hide what compression does."""
    async with fake_service(FakeEngine()) as client:
        await client.post("/generate", json={"prompt": "short"})
    (line,) = of_generations(log)
    assert "CompressionRatio" not in line.values
    assert "KeptAttentionMass" not in line.values


@pytest.mark.parametrize("stream", [False, True])
async def test_failed_generation_counts_as_error(log: io.StringIO, stream: bool) -> None:
    """Failures and deadlines are errors; what was not measured is left out."""
    engine = FakeEngine()
    engine.behaviour.fail_after = 0
    async with fake_service(engine) as client:
        await client.post("/generate", json={"prompt": "a", "stream": stream})
        engine.behaviour.fail_after, engine.behaviour.stall_after = None, 0
        await client.post(
            "/generate",
            json={"prompt": "a", "stream": stream},
            headers={"X-Request-Timeout": "0.02"},
        )
    lines = of_generations(log)
    assert [line.values["Errors"] for line in lines] == [1, 1]
    assert not any("TimeToFirstToken" in line.values for line in lines)


@pytest.mark.parametrize(
    ("reason", "errors"),
    [
        (FinishReason.STOP, 0),
        (FinishReason.LENGTH, 0),
        (FinishReason.ABORT, 0),
        (FinishReason.ERROR, 1),
        (FinishReason.DEADLINE, 1),
    ],
)
def test_what_counts_as_an_error(log: io.StringIO, reason: FinishReason, errors: int) -> None:
    """A client that leaves is none."""
    EmfMetrics("s").on_generation(record_with(finish_reason=reason))
    (line,) = of_generations(log)
    assert line.values == {"Latency": 12.5, "InputTokens": 7, "OutputTokens": 0, "Errors": errors}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_value_that_json_cannot_hold_is_left_out(log: io.StringIO, value: float) -> None:
    """One such value would cost the whole line."""
    timings = RequestTimings(value, 1.0, 1.0, 1.0, 1.0)
    EmfMetrics("s").on_generation(record_with(duration_ms=1.0, timings=timings))
    (line,) = of_generations(log)
    assert "QueueTime" not in line.values


@pytest.mark.parametrize(
    ("name", "dimension"),
    [("模型", "??"), (" ", "unknown"), ("m" * 2_000, "m" * 1_024), ("org/name:1", "org/name:1")],
)
def test_name_that_cloudwatch_refuses_is_made_to_fit(
    log: io.StringIO, name: str, dimension: str
) -> None:
    """CloudWatch drops metrics whose dimension is blank, too long or not ASCII."""
    EmfMetrics("s").on_generation(record_with(model=name))
    (line,) = of_generations(log)
    assert line.dimensions["Model"] == dimension


async def test_engine_is_reported_once_it_is_ready(log: io.StringIO) -> None:
    """Autoscaling sees a new server at once: what it runs, what waits, and the pages."""
    async with fake_service(FakeEngine()):
        await until(lambda: of_engine(log))
    (line,) = of_engine(log)
    assert line.dimensions == {"Service": "snapkv-inference", "Model": "fake"}
    assert line.values == {
        "SequencesRunning": 0,
        "RequestsWaiting": 0,
        "Load": 0,
        "PagesUsed": 0,
        "PagesReservedPercent": 0,
        "EngineAlive": 1,
    }


async def test_engine_is_reported_again_and_again(log: io.StringIO) -> None:
    """Each line shows its own moment, and a failure to ask costs one line only."""
    answers = iter(
        [
            stats_with(num_running=3, num_waiting=2, num_pages_used=4, num_pages_reserved=5),
            None,
            stats_with(num_pages_total=0, is_alive=False),
        ]
    )

    def ask() -> EngineStats:
        stats = next(answers, None)
        if stats is None:
            raise RuntimeError("the engine does not answer")
        return stats

    emf = EmfMetrics("s", interval_s=0.001)
    emf.watch(ask, "m")
    await until(lambda: len(of_engine(log)) == 2)
    await emf.stop()
    first, second = of_engine(log)
    assert first.values == {
        "SequencesRunning": 3,
        "RequestsWaiting": 2,
        "Load": 5,
        "PagesUsed": 4,
        "PagesReservedPercent": 12.5,
        "EngineAlive": 1,
    }
    assert "PagesReservedPercent" not in second.values
    assert second.values["EngineAlive"] == 0
    events = [json.loads(text)["event"] for text in log.getvalue().splitlines()]
    assert "engine_metrics_failed" in events


async def test_nothing_is_written_after_the_end(log: io.StringIO) -> None:
    """The reporting task ends with the app, also when it never began."""
    emf = EmfMetrics("s", interval_s=0.0)
    await emf.stop()
    emf.watch(lambda: stats_with(), "m")
    await until(lambda: of_engine(log))
    await emf.stop()
    written = log.getvalue()
    with pytest.raises(TimeoutError):
        await until(lambda: log.getvalue() != written, within_s=0.05)


async def test_off_means_off(log: io.StringIO) -> None:
    """Nobody pays for lines that nobody reads."""
    async with fake_service(FakeEngine(), emf="off") as client:
        await client.post("/generate", json={"prompt": "a"})
    assert "inference_complete" in log.getvalue()
    assert "_aws" not in log.getvalue()


async def test_metrics_do_not_depend_on_the_log_level() -> None:
    """Alarms must not fall silent because somebody wanted fewer lines."""
    with captured_log("error") as log:
        async with fake_service(FakeEngine()) as client:
            await client.post("/generate", json={"prompt": "a"})
        assert of_generations(log)
        assert of_engine(log)
        assert "inference_complete" not in log.getvalue()


def test_documentation_names_every_metric() -> None:
    """Whoever writes an alarm finds names, units and dimensions."""
    text = (ROOT / "docs" / "logs.md").read_text(encoding="utf-8")
    missing = [name for name in (*UNITS, *DIMENSIONS) if f"`{name}`" not in text]
    assert not missing


@pytest.mark.parametrize(
    "change",
    [
        {"Unit": "ms"},
        {"Name": ""},
        {"StorageResolution": 30},
        {"Value": 1},
    ],
)
def test_reader_refuses_what_the_specification_forbids(change: dict[str, object]) -> None:
    """The tests above would otherwise pass on anything."""
    metric = {"Name": "Latency", "Unit": "Milliseconds"} | change
    directive = {"Namespace": "SnapKV", "Dimensions": [["Service"]], "Metrics": [metric]}
    metadata = {"Timestamp": 1_800_000_000_000, "CloudWatchMetrics": [directive]}
    with pytest.raises(ValidationError):
        read_emf(json.dumps({"_aws": metadata, "Service": "s", "Latency": 1, "": 1}))


def stats_with(**values: object) -> EngineStats:
    """Return the numbers of an engine of 40 pages."""
    numbers: dict[str, object] = {
        "num_waiting": 0,
        "num_running": 0,
        "kv_bytes": 0,
        "num_pages_used": 0,
        "num_pages_reserved": 0,
        "num_pages_total": 40,
        "page_bytes": 256,
        "workspace_bytes": 0,
        "device_memory_bytes": 0,
        "last_step_age_s": 0.0,
        "is_alive": True,
    }
    return EngineStats(**(numbers | values))  # type: ignore[arg-type]  # right by construction
