"""A Cost Explorer on loopback: strict about what it is asked, and able to fail.

It speaks the service's JSON protocol and works its answers out from a bill, the way AWS does: a tag
that is not activated finds nothing, the end of a period is left out, long answers come in pages.
"""

import json
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date, timedelta
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, cast

_TARGET: Final = "AWSInsightsIndexService."
#: Everything that the operations take and this server understands.
_KNOWN_FIELDS: Final = {
    "GetCostAndUsage": {
        "TimePeriod", "Granularity", "Filter", "Metrics", "GroupBy", "NextPageToken",
    },
    "GetCostForecast": {"TimePeriod", "Granularity", "Filter", "Metric"},
    "ListCostAllocationTags": {"TagKeys", "Type"},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LineItem:
    """A line of the bill."""

    day: date
    service: str
    amount: str
    tags: Mapping[str, str] = field(default_factory=dict)
    unit: str = "USD"


@dataclass(slots=True)
class Account:
    """What AWS knows of an account.

    Attributes:
        today: The day, in UTC.
        bill: Its costs.
        tag_statuses: `Active` or `Inactive` for each tag key that AWS has seen on a resource.
        may_list_tags: Whether the account is the payer's.
        forecast_per_day: What every further day will cost; None without enough history.
        page_size: Groups in one page of an answer.
    """

    today: date
    bill: list[LineItem] = field(default_factory=list)
    tag_statuses: dict[str, str] = field(default_factory=dict)
    may_list_tags: bool = True
    forecast_per_day: str | None = "10.5"
    page_size: int = 1_000


@dataclass(frozen=True, slots=True)
class Fault:
    """An answer that is not the right one; a stalled one comes only when the server closes."""

    status: int = 200
    body: bytes = b"{}"
    is_stalled: bool = False


class RefusedError(Exception):
    """A request that AWS would refuse, with its code."""


class FakeCostExplorer:
    """The server's state: the account it answers for, faults to come, and what it was asked.

    Attributes:
        account: Whose bill it is.
        faults: Answers to give instead of the next right ones, by operation.
        requests: Operation and body of every request, in order.
        address: Its URL.
    """

    def __init__(self, account: Account, address: str) -> None:
        self.account = account
        self.address = address
        self.faults: dict[str, deque[Fault]] = defaultdict(deque)
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.released = threading.Event()
        self._first_pages: dict[str, dict[str, Any]] = {}

    def refuse(self, operation: str, code: str, *, status: int = 400, times: int = 1) -> None:
        """Answer the next requests with an error."""
        body = json.dumps({"__type": f"com.example#{code}", "message": "secret words"}).encode()
        self.faults[operation].extend([Fault(status, body)] * times)

    def asked(self, operation: str) -> list[dict[str, Any]]:
        """Return the bodies of one operation's requests."""
        return [body for name, body in self.requests if name == operation]

    def answer(self, operation: str, body: dict[str, Any]) -> dict[str, Any]:
        """Answer as AWS would.

        Raises:
            RefusedError: AWS would refuse.
        """
        if set(body) - _KNOWN_FIELDS.get(operation, set()):
            raise RefusedError("ValidationException")
        match operation:
            case "GetCostAndUsage":
                return self._costs(body)
            case "GetCostForecast":
                return self._forecast(body)
            case "ListCostAllocationTags":
                return self._tags(body)
        raise RefusedError("UnknownOperationException")

    def _costs(self, body: dict[str, Any]) -> dict[str, Any]:
        start, end = _period(body)
        by_service, by_tag = body["GroupBy"]
        if end > self.account.today + timedelta(days=1) or body["Metrics"] != ["UnblendedCost"]:
            raise RefusedError("ValidationException")
        if by_service != {"Type": "DIMENSION", "Key": "SERVICE"} or by_tag["Type"] != "TAG":
            raise RefusedError("ValidationException")
        offset = self._offset(body)
        groups = self._groups(start, end, body.get("Filter"), by_tag["Key"])
        page = groups[offset : offset + self.account.page_size]
        days = [start + timedelta(days=number) for number in range((end - start).days)]
        answer: dict[str, Any] = {
            "GroupDefinitions": body["GroupBy"],
            "ResultsByTime": [
                {
                    "TimePeriod": {"Start": f"{day}", "End": f"{day + timedelta(days=1)}"},
                    "Total": {},
                    "Groups": [group for of_day, group in page if of_day == day],
                    "Estimated": True,
                }
                for day in days
            ],
            "DimensionValueAttributes": [],
        }
        if offset + len(page) < len(groups):
            token = f"page-{len(self._first_pages)}-{offset + len(page)}"
            self._first_pages[token] = {**body, "NextPageToken": None}
            answer["NextPageToken"] = token
        return answer

    def _offset(self, body: dict[str, Any]) -> int:
        token = body.get("NextPageToken")
        if token is None:
            return 0
        if token not in self._first_pages:
            raise RefusedError("InvalidNextTokenException")
        if self._first_pages[token] != {**body, "NextPageToken": None}:
            raise RefusedError("RequestChangedException")
        return int(token.rpartition("-")[2])

    def _groups(
        self, start: date, end: date, only: dict[str, Any] | None, tag_key: str
    ) -> list[tuple[date, dict[str, Any]]]:
        sums: dict[tuple[date, str, str, str], Decimal] = defaultdict(Decimal)
        for item in self.account.bill:
            if start <= item.day < end and self._matches(item, only):
                tier = self._visible_tags(item).get(tag_key, "")
                sums[item.day, item.service, tier, item.unit] += Decimal(item.amount)
        return [
            (
                day,
                {
                    "Keys": [service, f"{tag_key}${tier}"],
                    "Metrics": {"UnblendedCost": {"Amount": str(amount), "Unit": unit}},
                },
            )
            for (day, service, tier, unit), amount in sorted(sums.items())
        ]

    def _visible_tags(self, item: LineItem) -> dict[str, str]:
        statuses = self.account.tag_statuses
        return {key: value for key, value in item.tags.items() if statuses.get(key) == "Active"}

    def _matches(self, item: LineItem, only: dict[str, Any] | None) -> bool:
        if only is None:
            return True
        return self._visible_tags(item).get(only["Tags"]["Key"]) in only["Tags"]["Values"]

    def _forecast(self, body: dict[str, Any]) -> dict[str, Any]:
        start, end = _period(body)
        if start < self.account.today or body["Metric"] != "UNBLENDED_COST":
            raise RefusedError("ValidationException")
        if self.account.forecast_per_day is None:
            raise RefusedError("DataUnavailableException")
        total = Decimal(self.account.forecast_per_day) * (end - start).days
        return {"Total": {"Amount": str(total), "Unit": "USD"}, "ForecastResultsByTime": []}

    def _tags(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self.account.may_list_tags:
            raise RefusedError("AccessDeniedException")
        statuses = self.account.tag_statuses
        return {
            "CostAllocationTags": [
                {"TagKey": key, "Type": "UserDefined", "Status": statuses[key]}
                for key in body["TagKeys"]
                if key in statuses
            ]
        }


def _period(body: dict[str, Any]) -> tuple[date, date]:
    start, end = (date.fromisoformat(body["TimePeriod"][edge]) for edge in ("Start", "End"))
    if start >= end or body["Granularity"] != "DAILY":
        raise RefusedError("ValidationException")
    return start, end


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    fake: FakeCostExplorer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:  # the name that http.server calls
        fake = cast("_Server", self.server).fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        operation = self.headers["X-Amz-Target"].removeprefix(_TARGET)
        fake.requests.append((operation, body))
        assert "/us-east-1/ce/aws4_request" in self.headers["Authorization"]
        if fake.faults[operation]:
            fault = fake.faults[operation].popleft()
            if fault.is_stalled:
                fake.released.wait(30)
            self._send(fault.status, fault.body)
            return
        try:
            self._send(200, json.dumps(fake.answer(operation, body)).encode())
        except RefusedError as error:
            self._send(400, json.dumps({"__type": str(error), "message": "no"}).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/x-amz-json-1.1")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output free of access lines."""


@contextmanager
def cost_explorer(account: Account) -> Iterator[FakeCostExplorer]:
    """Serve an account's bill until the block ends."""
    with _Server(("127.0.0.1", 0), _Handler) as server:
        fake = FakeCostExplorer(account, f"http://127.0.0.1:{server.server_port}")
        server.fake = fake
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield fake
        finally:
            fake.released.set()
            server.shutdown()
            thread.join()
