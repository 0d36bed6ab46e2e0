"""AWS calls in traces, made with real clients against a stand-in for AWS on this machine."""

import asyncio
import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from botocore.config import Config
from fastapi import FastAPI
from moto.server import ThreadedMotoServer

from app.main import create_app
from app.telemetry.tracing.xray_context import instrument_botocore
from tests.support.app_client import running, settings_for_tests
from tests.support.fake_engine import FakeEngine
from tests.support.logs import captured_log
from tests.support.markdown import ROOT
from tests.support.served import example_environment
from tests.support.xray_daemon import XRayDaemon

#: Does under Lambda what a request with an AWS call does; the environment is all there is.
UNDER_LAMBDA = """
from aws_xray_sdk.core import xray_recorder
from app.telemetry.tracing.xray_context import CONTEXT, RequestSegment, instrument_botocore
instrument_botocore()
trace_id = "1-5759e988-bd862e3fe1be46a994272793"
segment = RequestSegment("snapkv", trace_id, None, lambda entity: print(entity.serialize()))
CONTEXT.put_segment(segment)
with xray_recorder.in_subsegment("dynamodb", namespace="aws"):
    pass
segment.close()
segment.send_when_complete()
"""


@pytest.fixture(scope="module")
def aws() -> Iterator[str]:
    """Run the stand-in and yield its address."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def table(aws: str) -> Any:
    """Return a client of a table service, instrumented as the service's own clients are."""
    instrument_botocore()
    return boto3.client(
        "dynamodb",
        endpoint_url=aws,
        region_name="eu-central-1",
        aws_access_key_id="x",
        aws_secret_access_key="x",
        config=Config(connect_timeout=5, read_timeout=5, retries={"total_max_attempts": 1}),
    )


@pytest.fixture
def daemon() -> Iterator[XRayDaemon]:
    """Listen where the service sends its segments."""
    with XRayDaemon() as daemon:
        yield daemon


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Capture the log."""
    with captured_log("info") as stream:
        yield stream


def app_for(daemon: XRayDaemon) -> FastAPI:
    """Build a service that traces every request."""
    settings = settings_for_tests(
        tracing="xray", xray_daemon_address=daemon.address, trace_sampling_rate=1.0
    )
    return create_app(settings, FakeEngine())


def ours(log: io.StringIO) -> list[dict[str, Any]]:
    """Return log lines of the SDK, and any that report a problem."""
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    return [
        line
        for line in lines
        if line["logger"].startswith("aws_xray_sdk") or line["level"] in ("warning", "error")
    ]


async def test_call_of_a_request_is_a_part_of_its_segment(
    daemon: XRayDaemon, table: Any, log: io.StringIO
) -> None:
    """On a worker thread, as every AWS call is made."""
    app = app_for(daemon)

    async def route() -> int:
        answer = await asyncio.to_thread(table.list_tables)
        return len(answer["TableNames"])

    app.add_api_route("/tables", route)
    async with running(app) as client:
        assert (await client.get("/tables")).json() == 0
    segment = await daemon.segment()
    (call,) = segment["subsegments"]
    assert (call["name"], call["namespace"]) == ("dynamodb", "aws")
    assert call["aws"]["operation"] == "ListTables"
    assert call["parent_id"] == segment["id"]
    assert ours(log) == []


async def test_call_behind_the_answer_works_and_is_not_traced(
    daemon: XRayDaemon, table: Any, log: io.StringIO
) -> None:
    """A request starts a thread, with its context, that calls when the answer is long gone."""
    app = app_for(daemon)
    is_answered = threading.Event()
    left: list[asyncio.Task[Any]] = []

    def call_late() -> Any:
        assert is_answered.wait(10)
        return table.list_tables()

    async def route() -> str:
        left.append(asyncio.create_task(asyncio.to_thread(call_late)))
        return "started"

    app.add_api_route("/later", route)
    async with running(app) as client:
        assert (await client.get("/later")).json() == "started"
        segment = await daemon.segment()
        is_answered.set()
        assert (await left[0])["TableNames"] == []
    assert "subsegments" not in segment
    assert len(daemon.documents()) == 1
    assert ours(log) == []


async def test_call_outside_any_request_works_and_logs_nothing(
    table: Any, log: io.StringIO
) -> None:
    assert (await asyncio.to_thread(table.list_tables))["TableNames"] == []
    with pytest.raises(table.exceptions.ResourceNotFoundException):
        await asyncio.to_thread(table.describe_table, TableName="missing")
    assert ours(log) == []


async def test_failed_call_is_a_fault_of_its_own(daemon: XRayDaemon, table: Any) -> None:
    """The request that coped with it is none."""
    app = app_for(daemon)

    async def route() -> str:
        with pytest.raises(table.exceptions.ResourceNotFoundException):
            await asyncio.to_thread(table.describe_table, TableName="missing")
        return "coped"

    app.add_api_route("/missing", route)
    async with running(app) as client:
        assert (await client.get("/missing")).status_code == httpx.codes.OK
    segment = await daemon.segment()
    (call,) = segment["subsegments"]
    assert call["fault"]
    assert "fault" not in segment


def test_lambda_takes_our_context(tmp_path: Path) -> None:
    """The context that the SDK takes there by itself refuses segments, and loses the call."""
    environment = example_environment(tmp_path) | {
        "LAMBDA_TASK_ROOT": "/var/task",
        "AWS_LAMBDA_FUNCTION_NAME": "snapkv",
        "_X_AMZN_TRACE_ID": "Root=1-11111111-222222222222222222222222;Sampled=1",
    }
    command = [sys.executable, "-c", UNDER_LAMBDA]
    printed = subprocess.check_output(command, cwd=ROOT, env=environment, timeout=120)
    (line,) = printed.splitlines()
    segment = json.loads(line)
    assert segment["trace_id"] == "1-5759e988-bd862e3fe1be46a994272793"
    (call,) = segment["subsegments"]
    assert (call["name"], call["parent_id"]) == ("dynamodb", segment["id"])
