"""Faults stay with the request they belong to, and what cannot be served is refused at load."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from snapkv_core import (
    AsyncEngine,
    Engine,
    EngineConfig,
    GenerationFailedError,
    InvalidParameterError,
    ModelLoadError,
    QueueFullError,
    SamplingParams,
)
from snapkv_core.engine import model_runner, sampler
from snapkv_core.models.demo import demo_model_dir
from snapkv_core.models.tokenizer import HFTokenizer
from tests.support.engines import ask, drain, make_engine, make_request, run_together, summary_of
from tests.support.essays import cache_dir
from tests.support.logs import captured_log
from tests.support.models import ByteTokenizer, build_model, random_prompt


@asynccontextmanager
async def async_engine(**settings: Any) -> AsyncIterator[AsyncEngine]:
    """Run a tiny engine on its thread."""
    engine = AsyncEngine(make_engine(build_model("llama", 2, seed=3), **settings))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


async def test_a_burst_waits_or_is_refused_at_the_door_but_never_fails() -> None:
    async with async_engine(max_num_seqs=3, max_num_waiting=2) as engine:

        async def one(index: int) -> str:
            try:
                stream = await engine.submit(
                    make_request(random_prompt(40, seed=index), max_new_tokens=4, n=1 + index % 3)
                )
            except QueueFullError:
                return "refused"
            events = [event async for event in stream]
            return events[-1].error or "served"

        outcomes = await asyncio.gather(*(one(index) for index in range(12)))
    assert set(outcomes) == {"served", "refused"}
    assert outcomes.count("served") >= 5


async def test_closing_a_second_request_of_one_name_leaves_the_first_alone() -> None:
    async with async_engine() as engine:
        request = make_request(random_prompt(30), max_new_tokens=8, ignore_eos=True)
        first = await engine.submit(request)
        second = await engine.submit(request)
        await second.aclose()
        events = [event async for event in first]
        assert summary_of(events).num_output_tokens == 8


async def test_answers_that_nobody_reads_hold_no_place_in_the_queue() -> None:
    async with async_engine(max_num_seqs=1, max_num_waiting=1) as engine:
        for index in range(4):
            await engine.submit(make_request(random_prompt(10, seed=index), max_new_tokens=1))
            async with asyncio.timeout(20):
                while engine.stats().num_running or engine.stats().num_waiting:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)


async def test_closing_a_stream_wakes_its_reader() -> None:
    async with async_engine() as engine:
        stream = await engine.submit(make_request(random_prompt(30), max_new_tokens=500))

        async def read() -> int:
            return len([event async for event in stream])

        reading = asyncio.create_task(read())
        await asyncio.sleep(0.1)
        await stream.aclose()
        assert await asyncio.wait_for(reading, 10) >= 0


def test_a_row_that_cannot_be_sampled_fails_its_batch_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(build_model("llama", 2, seed=3))
    honest = sampler.sample_token

    def failing(logits: torch.Tensor, sampling: SamplingParams, **position: int) -> int:
        if sampling.seed == 13 and position["token_index"] == 2:
            raise RuntimeError("no memory for the sort")
        return honest(logits, sampling, **position)

    monkeypatch.setattr(model_runner, "sample_token", failing)
    requests = [make_request(random_prompt(9), seed=seed, max_new_tokens=6) for seed in (12, 13)]
    found = run_together(engine, requests)
    assert {events[-1].finish_reason for events in found} == {"error"}
    assert engine.kv_bytes == 0
    assert ask(engine, random_prompt(9), max_new_tokens=3).texts


def test_a_tokenizer_that_raises_fails_the_answer_and_no_more() -> None:
    class Fragile(ByteTokenizer):
        def decode(self, token_ids: Any) -> str:
            if len(token_ids) > 3:
                raise IndexError("no such token")
            return super().decode(token_ids)

    engine = make_engine(build_model("llama", 2, seed=3), Fragile())
    engine.add_request(make_request(random_prompt(1), max_new_tokens=9, ignore_eos=True))
    assert drain(engine)[-1].error
    assert engine.kv_bytes == 0


def test_a_failed_or_interrupted_generate_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(build_model("llama", 2, seed=3))
    request = make_request(random_prompt(9), n=2, max_new_tokens=6, seed=1)
    monkeypatch.setattr(model_runner, "sample_token", lambda *_, **__: 1 / 0)
    with pytest.raises(GenerationFailedError):
        engine.generate(request)
    assert not engine.has_work
    assert engine.kv_bytes == 0
    monkeypatch.undo()
    assert len(engine.generate(request).texts) == 2


@pytest.mark.parametrize("limits", [{"max_new_tokens_limit": 1}, {"max_model_len": 2}])
def test_the_smallest_legal_limits_warm_up(limits: dict[str, int]) -> None:
    config = {"max_new_tokens_limit": 4096, "default_max_new_tokens": 1} | limits
    make_engine(build_model("llama", 2, seed=3), **config).warm_up()


def test_one_stop_string_in_place_of_a_tuple_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="stop"):
        SamplingParams(stop="abc")  # type: ignore[arg-type]


@pytest.fixture
def saved_model(tmp_path: Path) -> Path:
    """Save a tiny model with the demo's tokenizer."""
    model: Any = build_model("llama", 2, seed=3)
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((demo_model_dir(cache_dir()) / name).read_bytes())
    return tmp_path


@pytest.mark.demo
@pytest.mark.parametrize("damage", ["missing", "shape", "truncated", "renamed"])
def test_weights_that_are_not_whole_are_refused(saved_model: Path, damage: str) -> None:
    path = saved_model / "model.safetensors"
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-500])
    else:
        tensors = load_file(path)
        name = "model.layers.1.mlp.up_proj.weight"
        if damage == "missing":
            del tensors[name]
        elif damage == "shape":
            tensors[name] = tensors[name][:-1].clone()
        else:
            tensors = {f"x.{key}": value for key, value in tensors.items()}
        save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError) as refused:
        Engine.load(EngineConfig(model=str(saved_model), device="cpu", dtype="float32"))
    assert "\n" not in str(refused.value)
    assert saved_model.name in str(refused.value)


@pytest.mark.demo
def test_a_whole_folder_is_served_under_its_name(saved_model: Path) -> None:
    engine = Engine.load(EngineConfig(model=str(saved_model), device="cpu", dtype="float32"))
    assert engine.spec.name == saved_model.name


@pytest.mark.parametrize("kind", ["t5", "mamba"])
def test_a_model_of_another_kind_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ModelLoadError) as refused:
        Engine.load(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32"))
    assert "\n" not in str(refused.value)


@pytest.mark.demo
def test_truncation_saved_with_a_tokenizer_is_not_applied() -> None:
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer.from_file(str(demo_model_dir(cache_dir()) / "tokenizer.json"))
    core.enable_truncation(8)
    core.enable_padding(length=64)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=core)
    ids = HFTokenizer(wrapped).encode("one two three four five six seven eight nine ten")
    assert len(ids) == 10


@pytest.mark.parametrize("method", ["run_slice", "run_batch"])
def test_a_failed_step_is_logged_with_the_requests_that_it_ends(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a field, so that whoever has the id of an answer finds the stack trace."""
    engine = make_engine(build_model("llama", 2, seed=3))

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(engine.parts.runner, method, fail)
    with captured_log("error") as log:
        request = make_request(random_prompt(40, seed=1), max_new_tokens=4, ignore_eos=True)
        with pytest.raises(GenerationFailedError):
            engine.generate(request)
    (line,) = (json.loads(line) for line in log.getvalue().splitlines())
    assert line["request_id"] == request.request_id
    assert line["error_type"] == "RuntimeError"
