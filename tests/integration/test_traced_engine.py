"""A real engine in a traced service: its measured times lie within the request's segment."""

import asyncio
import itertools

from app.main import create_app
from snapkv_core import AsyncEngine
from tests.support.app_client import running, settings_for_tests
from tests.support.engines import make_engine
from tests.support.models import build_model
from tests.support.xray_daemon import XRayDaemon


async def test_measured_times_lie_within_the_request() -> None:
    """In order, without a gap, and as long as the answer itself says."""
    engine = AsyncEngine(make_engine(build_model("llama", 2, seed=51)))
    with XRayDaemon() as daemon:
        settings = settings_for_tests(
            tracing="xray", xray_daemon_address=daemon.address, trace_sampling_rate=1.0
        )
        async with running(create_app(settings, engine)) as client:
            body = {
                "prompt": "x" * 200,
                "max_new_tokens": 8,
                "ignore_eos": True,
                "max_capacity_prompt": 64,
                "window_size": 8,
            }
            answer = await client.post("/generate", json=body)
        segment = await daemon.segment()
    await asyncio.to_thread(engine.stop)
    timings = answer.json()["timings"]
    queue, prefill, decode = segment["subsegments"]
    (compress,) = prefill["subsegments"]
    for part in (queue, prefill, decode):
        measured_ms = (part["end_time"] - part["start_time"]) * 1e3
        assert abs(measured_ms - timings[f"{part['name']}_ms"]) < 0.01
    marks = [
        segment["start_time"],
        queue["start_time"],
        prefill["start_time"],
        decode["start_time"],
        decode["end_time"],
        segment["end_time"],
    ]
    # Two clocks take part; they are a fraction of a millisecond apart.
    assert all(later - earlier > -0.0005 for earlier, later in itertools.pairwise(marks))
    assert prefill["start_time"] <= compress["start_time"] < compress["end_time"]
    assert compress["end_time"] <= prefill["end_time"]
