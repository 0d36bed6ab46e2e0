"""Owns the headers in which a request's trace travels from service to service."""

import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

TRACE_HEADER: Final = "X-Amzn-Trace-Id"
TRACEPARENT_HEADER: Final = "traceparent"

_ROOT: Final = re.compile(r"1-([0-9a-f]{8})-([0-9a-f]{24})", re.IGNORECASE)
_PARENT: Final = re.compile(r"[0-9a-f]{16}", re.IGNORECASE)
_TRACEPARENT: Final = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<parent>[0-9a-f]{16})"
    r"-(?P<flags>[0-9a-f]{2})(?P<rest>-.*)?"
)
_DECISIONS: Final = {"0": False, "1": True}


@dataclass(frozen=True, slots=True)
class TraceParent:
    """What a caller said about the trace its request belongs to.

    Attributes:
        trace_id: 32 hexadecimal digits; None when the caller names no trace.
        parent_id: 16 hexadecimal digits, the caller's segment or span in that trace.
        is_sampled: Whether the caller wants it traced; None leaves that to this service.
    """

    trace_id: str | None = None
    parent_id: str | None = None
    is_sampled: bool | None = None


ReadParent = Callable[[Mapping[str, str]], TraceParent]


def read_amazon(headers: Mapping[str, str]) -> TraceParent:
    """Read `X-Amzn-Trace-Id`; what is malformed in it counts as absent."""
    fields = dict(
        part.strip().partition("=")[::2] for part in headers.get(TRACE_HEADER, "").split(";")
    )
    root = _ROOT.fullmatch(fields.get("Root", ""))
    trace_id = "".join(root.groups()).lower() if root else ""
    parent_id = (
        fields.get("Parent", "").lower() if _PARENT.fullmatch(fields.get("Parent", "")) else ""
    )
    is_sampled = _DECISIONS.get(fields.get("Sampled", ""))
    if not _is_id(trace_id):
        # A parent without its trace names nothing.
        return TraceParent(is_sampled=is_sampled)
    return TraceParent(trace_id, parent_id if _is_id(parent_id) else None, is_sampled)


def read_w3c(headers: Mapping[str, str]) -> TraceParent:
    """Read `traceparent`, and `X-Amzn-Trace-Id` where that is missing or malformed.

    An AWS load balancer adds its own header to every request, so the other one says more.
    """
    match = _TRACEPARENT.fullmatch(headers.get(TRACEPARENT_HEADER, "").strip())
    if match is None or not (_is_id(match["trace"]) and _is_id(match["parent"])):
        return read_amazon(headers)
    # Version 00 ends with its flags, later ones may go on; ff is none.
    if match["version"] == "ff" or (match["version"] == "00" and match["rest"]):
        return read_amazon(headers)
    return TraceParent(match["trace"], match["parent"], bool(int(match["flags"], 16) & 1))


def amazon_id(trace_id: str) -> str:
    """Write 32 hexadecimal digits the way X-Ray does: version, time, random part."""
    return f"1-{trace_id[:8]}-{trace_id[8:]}"


def amazon_header(trace_id: str, *, is_sampled: bool) -> str:
    """Return the `X-Amzn-Trace-Id` of an answer."""
    return f"Root={amazon_id(trace_id)};Sampled={int(is_sampled)}"


def new_trace_id() -> str:
    """Make up a trace id: seconds since 1970 first, which X-Ray insists on, then 96 random bits."""
    return f"{int(time.time()):08x}{secrets.token_hex(12)}"


def _is_id(digits: str) -> bool:
    return bool(digits.strip("0"))
