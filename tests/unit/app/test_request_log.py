"""The request log's thread: batches, repeated attempts, what is counted as lost, how it ends."""

import io
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from app.integrations.aws import batch_writer, request_log
from app.integrations.aws.clients import aws_client
from app.integrations.aws.request_log import RequestLog
from tests.support.aws import ScriptedAws, error, use_aws
from tests.support.generation_records import STARTED_AT, record_of
from tests.support.logs import captured_log, events_named

TABLE = "requests"
DONE: dict[str, Any] = {"UnprocessedItems": {}}


class Counts:
    """Counts items by outcome, and waits for a sum."""

    def __init__(self) -> None:
        self.by_outcome: Counter[str] = Counter()
        self._changed = threading.Condition()

    def add(self, outcome: str, num_items: int) -> None:
        """Count."""
        with self._changed:
            self.by_outcome[outcome] += num_items
            self._changed.notify_all()

    def wait_for(self, **expected: int) -> None:
        """Return when exactly so many items had these outcomes."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.by_outcome == expected, 20), self.by_outcome


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedAws]:
    """Run a DynamoDB for all tests: making a client takes longer than most of them."""
    with ScriptedAws(lambda _body: (200, DONE)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ScriptedAws) -> Any:
    """Return a client of it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_aws(monkeypatch, server.url)
        return aws_client("dynamodb", max_attempts=1)


@pytest.fixture
def aws(server: ScriptedAws) -> Iterator[ScriptedAws]:
    """Let it take everything, and forget what came before."""
    server.requests.clear()
    server.answer = lambda _body: (200, DONE)
    server.released.clear()
    yield server
    server.released.set()


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Capture the log."""
    with captured_log() as stream:
        yield stream


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pauses between attempts fifty times shorter."""
    monkeypatch.setattr(batch_writer, "_FIRST_PAUSE_S", 0.002)


def log_of(counts: Counts, client: Any, *, max_queued: int = 1_000) -> RequestLog:
    """Return a log that is not started."""
    return RequestLog(client, TABLE, ttl_days=30, count_items=counts.add, max_queued=max_queued)


def written_ids(request: dict[str, Any]) -> list[str]:
    """Return the request ids in the body of a `BatchWriteItem`."""
    puts = [entry["PutRequest"]["Item"] for entry in request["RequestItems"][TABLE]]
    return [item["request_id"]["S"] for item in puts]


def answers(*each: Callable[[dict[str, Any]], tuple[int, object]]) -> Callable[..., Any]:
    """Answer one request after the other as told, the last way for ever."""
    left = itertools.chain(each, itertools.repeat(each[-1]))
    return lambda body: next(left)(body)


def test_batches_are_full_while_there_is_enough(aws: ScriptedAws, client: Any) -> None:
    """25 at a time, in order, each item once."""
    counts = Counts()
    log = log_of(counts, client)
    for number in range(60):
        log.on_generation(record_of(f"req_{number}"))
    log.start()
    log.close(10)
    assert [len(written_ids(request)) for request in aws.requests] == [25, 25, 10]
    ids = [name for request in aws.requests for name in written_ids(request)]
    assert ids == [f"req_{number}" for number in range(60)]
    assert counts.by_outcome == {"written": 60}


def test_lone_item_is_written_after_a_second(aws: ScriptedAws, client: Any) -> None:
    """Nobody waits for 24 others."""
    counts = Counts()
    log = log_of(counts, client)
    log.start()
    begun_s = time.monotonic()
    log.on_generation(record_of())
    counts.wait_for(written=1)
    assert 0.9 <= time.monotonic() - begun_s < 10
    log.close(1)
    assert len(aws.requests) == 1


def test_full_batch_is_written_at_once(
    aws: ScriptedAws, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Age counts only for a batch that is not full."""
    monkeypatch.setattr(request_log, "MAX_ITEM_AGE_S", 3_600.0)
    counts = Counts()
    log = log_of(counts, client)
    log.start()
    for number in range(25):
        log.on_generation(record_of(f"req_{number}"))
    counts.wait_for(written=25)
    log.close(1)
    assert len(aws.requests) == 1


def test_same_id_does_not_cost_a_batch(aws: ScriptedAws, client: Any) -> None:
    """One id at two times is two items, and no batch holds a key twice."""
    counts = Counts()
    log = log_of(counts, client)
    later = STARTED_AT + timedelta(microseconds=1)
    for started_at in (STARTED_AT, later, STARTED_AT):
        log.on_generation(record_of("mine", started_at=started_at))
    log.start()
    log.close(10)
    assert [written_ids(request) for request in aws.requests] == [["mine", "mine"], ["mine"]]
    assert counts.by_outcome == {"written": 3}


def test_unprocessed_items_alone_are_sent_again(aws: ScriptedAws, client: Any) -> None:
    """What was taken is not written twice."""

    def keep_two(body: dict[str, Any]) -> tuple[int, object]:
        return 200, {"UnprocessedItems": {TABLE: body["RequestItems"][TABLE][-2:]}}

    aws.answer = answers(keep_two, keep_two, lambda _body: (200, DONE))
    counts = Counts()
    log = log_of(counts, client)
    for number in range(5):
        log.on_generation(record_of(f"req_{number}"))
    log.start()
    log.close(10)
    assert [len(written_ids(request)) for request in aws.requests] == [5, 2, 2]
    assert written_ids(aws.requests[2]) == ["req_3", "req_4"]
    assert counts.by_outcome == {"written": 5}


@pytest.mark.parametrize(
    "trouble",
    [
        error("ProvisionedThroughputExceededException"),
        error("ThrottlingException"),
        error("InternalServerError", 500),
        lambda _body: (200, b"<html>hello, I am a proxy</html>"),
        lambda _body: (200, b"\xff\xfe"),
        lambda _body: (200, {"UnprocessedItems": ["x"]}),
        lambda _body: (200, []),
        lambda _body: (502, b"bad gateway"),
    ],
    ids=["provisioned", "throttled", "500", "html", "binary", "wrong-shape", "list", "502"],
)
def test_passing_trouble_loses_nothing(aws: ScriptedAws, client: Any, trouble: Any) -> None:
    """Throttled or garbled, an attempt is repeated until the item is in."""
    aws.answer = answers(trouble, trouble, lambda _body: (200, DONE))
    counts = Counts()
    log = log_of(counts, client)
    log.on_generation(record_of())
    log.start()
    log.close(20)
    assert len(aws.requests) == 3
    assert counts.by_outcome == {"written": 1}


def test_lasting_trouble_is_bounded_and_counted(
    aws: ScriptedAws, client: Any, log: io.StringIO
) -> None:
    """After so many attempts the batch is given up, and the next one gets its own."""
    aws.answer = error("ProvisionedThroughputExceededException")
    counts = Counts()
    written = log_of(counts, client)
    for number in range(30):
        written.on_generation(record_of(f"req_{number}"))
    written.start()
    counts.wait_for(dropped=30)
    assert len(aws.requests) == 2 * batch_writer.MAX_ATTEMPTS
    aws.answer = lambda _body: (200, DONE)
    written.on_generation(record_of("req_30"))
    written.close(10)
    assert counts.by_outcome == {"dropped": 30, "written": 1}
    # Two batches were lost, and one line told of the first at once, the last one of the rest.
    lines = events_named(log, "request_log_items_lost")
    assert [line["num_items"] for line in lines] == [25, 5]
    assert {line["reason"] for line in lines} == {"ProvisionedThroughputExceededException"}


@pytest.mark.parametrize("code", ["ResourceNotFoundException", "AccessDeniedException"])
def test_refusal_is_not_repeated(
    aws: ScriptedAws, client: Any, log: io.StringIO, code: str
) -> None:
    """A table that is not there does not come by asking."""
    aws.answer = error(code)
    counts = Counts()
    refused = log_of(counts, client)
    refused.on_generation(record_of())
    refused.start()
    counts.wait_for(failed=1)
    refused.close(1)
    assert len(aws.requests) == 1
    (line,) = events_named(log, "request_log_items_lost")
    assert (line["num_items"], line["reason"]) == (1, code)


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, log: io.StringIO) -> None:
    """A refused connection is passing trouble like any other."""
    use_aws(monkeypatch, "http://127.0.0.1:9")
    counts = Counts()
    refused = log_of(counts, aws_client("dynamodb", max_attempts=1))
    refused.on_generation(record_of())
    refused.start()
    counts.wait_for(dropped=1)
    refused.close(1)
    (line,) = events_named(log, "request_log_items_lost")
    assert line["reason"] == "EndpointConnectionError"


def test_silent_dynamodb_is_given_up(aws: ScriptedAws, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt ends by itself, so the thread lives on."""
    monkeypatch.setattr(batch_writer, "MAX_ATTEMPTS", 2)
    use_aws(monkeypatch, aws.url)
    aws.answer = aws.hang
    counts = Counts()
    log = log_of(counts, aws_client("dynamodb", read_timeout_s=0.1, max_attempts=1))
    log.on_generation(record_of())
    log.start()
    counts.wait_for(dropped=1)
    aws.answer = lambda _body: (200, DONE)
    log.on_generation(record_of())
    log.close(10)
    assert counts.by_outcome == {"dropped": 1, "written": 1}


def test_full_queue_drops_the_newest(aws: ScriptedAws, client: Any, log: io.StringIO) -> None:
    """Memory is bounded while DynamoDB is away; what is lost is counted and told in few lines."""
    counts = Counts()
    full = log_of(counts, client, max_queued=10)
    for number in range(1_000):
        full.on_generation(record_of(f"req_{number}"))
    assert counts.by_outcome == {"dropped": 990}
    full.start()
    full.close(10)
    assert written_ids(aws.requests[0]) == [f"req_{number}" for number in range(10)]
    assert counts.by_outcome == {"dropped": 990, "written": 10}
    lines = events_named(log, "request_log_items_lost")
    assert [line["num_items"] for line in lines] == [1, 989]
    assert {line["reason"] for line in lines} == {"queue_full"}


def test_taking_a_record_waits_for_nothing(aws: ScriptedAws, client: Any) -> None:
    """The event loop goes on while DynamoDB hangs with a batch."""
    aws.answer = aws.hang
    counts = Counts()
    log = log_of(counts, client)
    for number in range(25):
        log.on_generation(record_of(f"req_{number}"))
    log.start()
    wait_until(lambda: aws.requests)
    begun_s = time.monotonic()
    for number in range(500):
        log.on_generation(record_of(f"more_{number}"))
    assert time.monotonic() - begun_s < 1
    log.close(0)
    assert counts.by_outcome == {"dropped": 525}


def test_close_is_bounded_and_counts_what_is_left(
    aws: ScriptedAws, client: Any, log: io.StringIO
) -> None:
    """A DynamoDB that hangs keeps no process from ending."""
    aws.answer = aws.hang
    counts = Counts()
    left = log_of(counts, client)
    for number in range(40):
        left.on_generation(record_of(f"req_{number}"))
    left.start()
    wait_until(lambda: aws.requests)
    begun_s = time.monotonic()
    left.close(0.2)
    assert time.monotonic() - begun_s < 2
    assert counts.by_outcome == {"dropped": 40}
    (line,) = events_named(log, "request_log_items_lost")
    assert (line["num_items"], line["reason"]) == (40, "no_time_left")
    # The attempt that was on its way ends after that, and is not counted again.
    aws.released.set()
    assert left._thread is not None
    left._thread.join(10)
    assert counts.by_outcome == {"dropped": 40}


def test_close_cuts_a_pause_short(
    aws: ScriptedAws, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end does not sit out a pause of an hour, and uses its time for another attempt."""
    pausing = threading.Event()

    def backoff_s(_attempt: int) -> float:
        pausing.set()
        return 3_600.0

    monkeypatch.setattr(batch_writer, "_backoff_s", backoff_s)
    aws.answer = answers(error("ThrottlingException"), lambda _body: (200, DONE))
    counts = Counts()
    log = log_of(counts, client)
    for number in range(25):
        log.on_generation(record_of(f"req_{number}"))
    log.start()
    assert pausing.wait(10)
    begun_s = time.monotonic()
    log.close(10)
    assert time.monotonic() - begun_s < 5.5
    assert counts.by_outcome == {"written": 25}


def test_after_close_records_are_dropped(aws: ScriptedAws, client: Any) -> None:
    """A straggler is counted, not queued for ever; closing again changes nothing."""
    counts = Counts()
    log = log_of(counts, client)
    log.start()
    log.close(5)
    log.on_generation(record_of())
    log.close(5)
    assert counts.by_outcome == {"dropped": 1}
    assert aws.requests == []


def test_log_that_never_ran_counts_what_it_holds() -> None:
    """An app whose start failed closes a log that was never started."""
    counts = Counts()
    log = RequestLog(None, TABLE, ttl_days=1, count_items=counts.add)
    log.on_generation(record_of())
    log.close(1)
    assert counts.by_outcome == {"dropped": 1}


def test_pauses_grow_and_are_drawn_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas that failed together do not come back together, nor wait without end."""
    monkeypatch.undo()
    longest = [batch_writer._FIRST_PAUSE_S * 2**number for number in range(20)]
    for attempt, bound_s in enumerate(longest, 1):
        drawn = {batch_writer._backoff_s(attempt) for _ in range(50)}
        assert len(drawn) > 40
        assert max(drawn) <= min(bound_s, batch_writer._MAX_PAUSE_S)
        assert min(drawn) < 0.5 * min(bound_s, batch_writer._MAX_PAUSE_S) < max(drawn)


def wait_until(condition: Callable[[], object], within_s: float = 10) -> None:
    """Return when `condition` gives something true."""
    give_up_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_s, "it did not happen"
        time.sleep(0.005)
