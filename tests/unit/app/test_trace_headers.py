"""The headers of a trace: what is read from a caller's, and what a broken one leads to."""

import re

import pytest

from app.telemetry.tracing.headers import (
    TraceParent,
    amazon_header,
    new_trace_id,
    read_amazon,
    read_w3c,
)

ROOT = "1-5759e988-bd862e3fe1be46a994272793"
TRACE = "5759e988bd862e3fe1be46a994272793"
PARENT = "53995c3f42cd8ad8"


@pytest.mark.parametrize(
    ("header", "parent"),
    [
        (f"Root={ROOT};Parent={PARENT};Sampled=1", TraceParent(TRACE, PARENT, True)),
        (f"Root={ROOT};Parent={PARENT};Sampled=0", TraceParent(TRACE, PARENT, False)),
        (f"Root={ROOT};Sampled=?", TraceParent(TRACE)),
        (f"Root={ROOT}", TraceParent(TRACE)),
        (f"Self=1-67891234-12456789abcdef012345678a;Root={ROOT}", TraceParent(TRACE)),
        (f" Sampled=1 ; Root={ROOT.upper()} ", TraceParent(TRACE, None, True)),
        (f"Root={ROOT};Parent={PARENT};Lineage=a87bd80c:1|68fd508a:5", TraceParent(TRACE, PARENT)),
        ("Sampled=1", TraceParent(is_sampled=True)),
    ],
)
def test_amazon_header_is_read(header: str, parent: TraceParent) -> None:
    assert read_amazon({"X-Amzn-Trace-Id": header}) == parent


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nonsense",
        ";;;===",
        f"Root=2{ROOT[1:]}",
        f"Root={ROOT}0",
        f"Root={ROOT[:-1]}g",
        f"Root=1-00000000-{'0' * 24}",
        f"Parent={PARENT}",
    ],
)
def test_malformed_amazon_header_counts_as_absent(header: str) -> None:
    assert read_amazon({"X-Amzn-Trace-Id": header}) == TraceParent()


@pytest.mark.parametrize("parent", ["0" * 16, PARENT[:-1], f"{PARENT}0", "zz" * 8, ""])
def test_malformed_parent_leaves_the_trace(parent: str) -> None:
    assert read_amazon({"X-Amzn-Trace-Id": f"Root={ROOT};Parent={parent}"}) == TraceParent(TRACE)


@pytest.mark.parametrize(
    ("header", "parent"),
    [
        (f"00-{TRACE}-{PARENT}-01", TraceParent(TRACE, PARENT, True)),
        (f"00-{TRACE}-{PARENT}-00", TraceParent(TRACE, PARENT, False)),
        (f"00-{TRACE}-{PARENT}-03", TraceParent(TRACE, PARENT, True)),
        (f"cc-{TRACE}-{PARENT}-01-what-the-future-holds", TraceParent(TRACE, PARENT, True)),
    ],
)
def test_traceparent_wins_over_the_load_balancers_header(header: str, parent: TraceParent) -> None:
    other = "Root=1-67891234-12456789abcdef012345678a;Sampled=1"
    assert read_w3c({"traceparent": header, "X-Amzn-Trace-Id": other}) == parent


@pytest.mark.parametrize(
    "header",
    [
        "",
        f"00-{TRACE}-{PARENT}",
        f"00-{TRACE}-{PARENT}-01-more",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
    ],
)
def test_malformed_traceparent_leaves_the_word_to_the_other_header(header: str) -> None:
    other = {"traceparent": header, "X-Amzn-Trace-Id": f"Root={ROOT};Sampled=1"}
    assert read_w3c(other) == TraceParent(TRACE, None, True)
    assert read_w3c({"traceparent": header}) == TraceParent()


def test_header_of_an_answer_is_read_back() -> None:
    for is_sampled in (True, False):
        header = amazon_header(TRACE, is_sampled=is_sampled)
        assert header == f"Root={ROOT};Sampled={int(is_sampled)}"
        assert read_amazon({"X-Amzn-Trace-Id": header}) == TraceParent(TRACE, None, is_sampled)


def test_new_ids_are_different_and_readable() -> None:
    ids = {new_trace_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch("[0-9a-f]{32}", trace_id) for trace_id in ids)
