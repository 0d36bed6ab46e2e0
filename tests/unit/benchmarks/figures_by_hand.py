"""Figures of every kind, made up, for tests of what is done with them."""

from benchmarks.attention import AttentionFigure
from benchmarks.engine_decode import DecodeFigure
from benchmarks.engine_memory import MemoryFigure
from benchmarks.engine_part import EngineFigures
from benchmarks.engine_prefill import PrefillFigure
from benchmarks.figures import Latency, Ratio, TimeLimit
from benchmarks.http_load import LoadFigure
from benchmarks.http_part import OTHER, OURS, HttpFigures
from benchmarks.machine import machine_facts
from benchmarks.mixed_scenario import MixedFigure
from benchmarks.report import BenchReport

LATENCY = Latency(count=9, p50_ms=50.0, p99_ms=400.0, max_ms=500.0)


def decode_figure(method: str, prompt_tokens: int, batch_size: int, step_ms: float) -> DecodeFigure:
    """Return a figure of float32 whose KV cache is a byte per prompt token."""
    return DecodeFigure(
        method=method,
        dtype="float32",
        prompt_tokens=prompt_tokens,
        batch_size=batch_size,
        step_ms=step_ms,
        tokens_per_s=batch_size / step_ms * 1e3,
        kv_bytes=batch_size * prompt_tokens,
    )


def load_figure(target: str, num_streams: int, output_tokens_per_s: float) -> LoadFigure:
    """Return a figure of prompts of 1,000 tokens."""
    return LoadFigure(
        target=target,
        num_streams=num_streams,
        aimed_prompt_tokens=1_000,
        prompt_tokens=998.0,
        output_tokens=64 * num_streams,
        ttft=LATENCY,
        inter_token=LATENCY,
        output_tokens_per_s=output_tokens_per_s,
    )


def mixed_figure_of(target: str) -> MixedFigure:
    """Return a figure in which gaps grow fivefold while the long prompt is read."""
    return MixedFigure(
        target=target,
        num_running=4,
        long_prompt_tokens=6_000,
        short_prompt_tokens=200,
        quiet=Latency(9, 50.0, 60.0, 70.0),
        reading=Latency(9, 250.0, 300.0, 310.0),
        long_ttft_ms=20_000.0,
        short_ttft_ms=5_000.0,
        timeline_ms=((-50.0, 50.0), (200.0, 250.0), (450.0, 250.0)),
    )


def whole_report(*, is_quick: bool = False) -> BenchReport:
    """Return a report with a figure of every kind."""
    grid = [
        decode_figure(method, tokens, batch, step_ms)
        for method, step_ms in (("full", 40.0), ("snapkv", 20.0))
        for tokens in (1_000, 6_000)
        for batch in (1, 4)
    ]
    return BenchReport(
        machine=machine_facts(),
        model="demo",
        is_quick=is_quick,
        engine=EngineFigures(
            decode=[decode_figure("full", 6_000, 8, 99.0), *grid],
            prefill=[PrefillFigure("float32", 3_000, 10.0, 20.0, 3e5, 1.5e5)],
            memory=[MemoryFigure("full", "float32", 3_000, 8, 1 << 30, 3 << 30, 1 << 20)],
            attention=[AttentionFigure("float32", 8, 576, 300.0, 200.0)],
            ratios=[Ratio("engine/float32/gain", 1.5, "higher", required=2.0)],
        ),
        http=HttpFigures(
            load=[load_figure(OURS, 1, 20.0), load_figure(OTHER, 1, 15.0)],
            mixed=[mixed_figure_of(OURS), mixed_figure_of(OTHER)],
            ratios=[Ratio("http/float32/pace", 1.2, "higher")],
            limits=[
                TimeLimit("http/float32/gap", 300.0, 1_000.0),
                TimeLimit("http/float32/first token", 5_000.0, 2_000.0),
            ],
        ),
    )
