"""Two real servers on the demo model share one real Redis: what one has read, the other knows."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.essays import load_essays
from tests.support.redis_server import RedisServer, redis_server
from tests.support.served import example_environment, serving
from tests.support.tools import require_tool

pytestmark = [pytest.mark.slow, pytest.mark.demo, pytest.mark.timeout(900)]

KNOBS = {"max_capacity_prompt": 128, "window_size": 16, "kernel_size": 15, "pooling": "max"}
#: Both prompts are long enough for a store on loopback to be faster than reading them.
NUM_CHARS = 2_400


@dataclass(frozen=True, slots=True)
class Replica:
    """One of the servers.

    Attributes:
        url: Where it listens.
        log: Its log.
    """

    url: str
    log: Path

    def ask(self, start: int, **fields: Any) -> httpx.Response:
        """Send a prompt cut out of the essays."""
        prompt = load_essays()[start : start + NUM_CHARS]
        body = {"prompt": prompt, "max_new_tokens": 12, **KNOBS, **fields}
        answer = httpx.post(f"{self.url}/generate", json=body, timeout=600)
        assert answer.status_code == 200, answer.text
        return answer

    def metric(self, series: str) -> float:
        """Read one series."""
        for line in httpx.get(f"{self.url}/metrics").text.splitlines():
            if line.startswith(f"{series} "):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"there is no {series}")

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens that it has read; the metric is a sum of fractions of them."""
        return round(self.metric('snapkv_step_tokens_total{phase="prefill"}'))

    @property
    def num_stored(self) -> float:
        """Snapshots that it has stored."""
        return self.metric('snapkv_snapshot_writes_total{outcome="stored"}')

    def wait_until_stored(self, num: float) -> None:
        """Return when it has stored so many snapshots, and none is in its memory."""
        give_up_s = time.monotonic() + 60
        while self.num_stored < num or self.metric("snapkv_snapshot_pending_bytes"):
            assert time.monotonic() < give_up_s, "nothing is stored"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Run the store."""
    program = require_tool("redis-server", "SNAPKV_TEST_REDIS_SERVER")
    with redis_server(program, tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def replicas(
    redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Replica, Replica]]:
    """Run two servers over it; the second one keeps snapshots in memory as well."""
    with ExitStack() as stack:
        found = []
        for number, memory_bytes in enumerate((0, 10**8)):
            folder = tmp_path_factory.mktemp(f"replica-{number}")
            environment = example_environment(folder) | {
                "SNAPKV_SNAPSHOT_VALKEY_URL": redis.url,
                "SNAPKV_SNAPSHOT_MEMORY_BYTES": str(memory_bytes),
            }
            log = folder / "server.log"
            address = stack.enter_context(serving(environment, log))
            found.append(Replica(f"http://{address}", log))
        yield found[0], found[1]


def without_times(answer: httpx.Response) -> dict[str, Any]:
    """Return an answer without what differs from request to request."""
    body: dict[str, Any] = answer.json()
    for field in ("id", "timings", "snapshot"):
        del body[field]
    return body


def test_what_one_has_read_the_other_answers_from_the_store(
    replicas: tuple[Replica, Replica],
) -> None:
    one, other = replicas
    first = one.ask(0, explain=True)
    one.wait_until_stored(1)
    second = other.ask(0, explain=True)
    third = other.ask(0, explain=True)
    uses = [answer.headers["X-Snapshot"] for answer in (first, second, third)]
    assert uses == ["stored", "hit", "hit"]
    assert without_times(first) == without_times(second) == without_times(third)
    assert other.num_prefill_tokens == 0
    num_tokens = first.json()["usage"]["prompt_tokens"]
    assert one.num_prefill_tokens == num_tokens > 400
    # The second server took it into its memory.
    assert other.metric('snapkv_snapshot_bytes_total{direction="fetched"}') > 0
    written = other.log.read_text("utf-8").splitlines()
    # Libraries write lines of their own while they are imported.
    lines = [json.loads(line) for line in written if line.startswith("{")]
    (line,) = [
        line
        for line in lines
        if line["event"] == "snapshot_looked_up" and line["request_id"] == second.json()["id"]
    ]
    assert line["snapshot"] == "hit"
    assert line["lookup_ms"] > 0


def test_eight_equal_prompts_at_once_cost_one_prefill_in_each(
    replicas: tuple[Replica, Replica],
) -> None:
    before = [replica.num_prefill_tokens for replica in replicas]
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda index: replicas[index % 2].ask(9_000), range(16)))
    texts = {json.dumps(without_times(answer)) for answer in answers}
    assert len(texts) == 1
    num_tokens = answers[0].json()["usage"]["prompt_tokens"]
    for replica, num_before in zip(replicas, before, strict=True):
        assert replica.num_prefill_tokens - num_before <= num_tokens


def test_a_request_that_keeps_out_leaves_nothing(
    replicas: tuple[Replica, Replica], redis: RedisServer
) -> None:
    num_keys = redis.client().dbsize()
    assert replicas[0].ask(20_000, snapshot="off").headers["X-Snapshot"] == "off"
    assert replicas[0].ask(20_000, snapshot="off").headers["X-Snapshot"] == "off"
    assert redis.client().dbsize() == num_keys


def test_flipped_bits_in_the_store_are_a_miss(
    replicas: tuple[Replica, Replica], redis: RedisServer
) -> None:
    one, _ = replicas
    for replica in replicas:
        replica.wait_until_stored(0)  # nothing is on its way any more
    redis.client().flushall()
    num_stored = one.num_stored
    expected = one.ask(50_000, explain=True)
    assert expected.headers["X-Snapshot"] == "stored"
    one.wait_until_stored(num_stored + 1)
    client = redis.client()
    (chunk,) = [key for key in client.scan_iter() if not key.endswith(b":m")]
    content = bytearray(client.get(chunk))
    content[len(content) // 2] ^= 1
    client.set(chunk, bytes(content))
    found = one.ask(50_000, explain=True)
    assert found.headers["X-Snapshot"] == "stored"
    assert without_times(found) == without_times(expected)


def test_requests_go_on_when_the_store_is_gone(
    replicas: tuple[Replica, Replica], redis: RedisServer
) -> None:
    """The last test of this file: the server that it stops stays away."""
    one, other = replicas
    redis.process.kill()
    redis.process.wait()
    uses = [one.ask(start).headers["X-Snapshot"] for start in (30_000, 35_000, 40_000, 45_000)]
    # After three failed lookups nobody asks any more, nor writes.
    assert uses == ["stored", "stored", "miss", "miss"]
    assert one.metric("snapkv_snapshot_held_back") == 1
    assert 3 <= one.metric('snapkv_snapshot_store_errors_total{store="valkey"}') <= 5
    # The one with a memory still has in it what it has read.
    assert [other.ask(9_000).headers["X-Snapshot"] for _ in range(2)] == ["hit", "hit"]
