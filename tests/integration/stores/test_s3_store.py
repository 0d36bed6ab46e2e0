"""The S3 store: against a server that works, and against one that does not."""

import hashlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from app.integrations.aws import snapshot_store
from app.integrations.aws.snapshot_store import S3StoreConfig, open_s3_store
from app.integrations.aws.weights.location import S3Location
from snapkv_core import InvalidParameterError, KVStore, StoreError
from tests.support.aws import plain_client
from tests.support.s3 import BUCKET as FAKE_BUCKET
from tests.support.s3 import FakeS3, Fault, S3Request, serving_s3
from tests.support.stores import (
    BUCKET,
    KEY,
    LOCATION,
    PART_BYTES,
    blob_of,
    key_of,
    s3_store,
)

BLOB = blob_of(2 * PART_BYTES + 1_000)
NAME = f"kv/v1/t/{KEY}"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def s3_client(s3_url: str) -> Iterator[Any]:
    """Return a client for what a test itself sees and does."""
    client = plain_client("s3", s3_url)
    yield client
    client.close()


@pytest.fixture
def client(s3_client: Any) -> Any:
    """Return that client; the bucket is empty."""
    for page in s3_client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
        for found in page.get("Contents", []):
            s3_client.delete_object(Bucket=BUCKET, Key=found["Key"])
    return s3_client


@pytest.fixture(scope="module")
def moto_store(s3_url: str) -> Iterator[KVStore]:
    """Return a store over a server that works."""
    with pytest.MonkeyPatch.context() as monkeypatch, s3_store(monkeypatch, s3_url) as store:
        yield store


@pytest.fixture
def store(client: Any, moto_store: KVStore) -> KVStore:
    """Return that store; its bucket is empty."""
    del client  # it has emptied the bucket
    return moto_store


@dataclass(frozen=True, slots=True)
class Faulty:
    """An S3 that answers what a test says, and a store over it.

    Attributes:
        s3: The server, with one blob in it.
        store: The store.
    """

    s3: FakeS3
    store: KVStore


@pytest.fixture(scope="module")
def faulty_s3() -> Iterator[Faulty]:
    """Run them."""
    fake = FakeS3(headers={"x-amz-meta-sha256": hashlib.sha256(BLOB).hexdigest()})
    location = S3Location(FAKE_BUCKET, LOCATION.prefix)
    with (
        serving_s3(fake) as url,
        pytest.MonkeyPatch.context() as monkeypatch,
        s3_store(monkeypatch, url, location=location) as store,
    ):
        yield Faulty(fake, store)


@pytest.fixture
def faulty(faulty_s3: Faulty) -> Faulty:
    """Begin without a fault."""
    faulty_s3.s3.objects[NAME] = BLOB
    faulty_s3.s3.fault_of = lambda _: None
    faulty_s3.s3.requests.clear()
    return faulty_s3


def test_large_blob_goes_in_parts_and_a_small_one_whole(client: Any, store: KVStore) -> None:
    """S3's tag of an object counts its parts; metadata names its content."""
    store.put("t", KEY, BLOB)
    store.put("t", key_of(1), b"blob")
    large = client.head_object(Bucket=BUCKET, Key=NAME)
    small = client.head_object(Bucket=BUCKET, Key=f"kv/v1/t/{key_of(1)}")
    assert large["ETag"].endswith('-3"')
    assert "-" not in small["ETag"]
    assert large["Metadata"] == {"sha256": hashlib.sha256(BLOB).hexdigest()}


def test_key_of_kms_is_used_when_it_is_named(
    client: Any, monkeypatch: pytest.MonkeyPatch, s3_url: str
) -> None:
    """In parts and whole; else the bucket decides."""
    with s3_store(monkeypatch, s3_url, kms_key_id="alias/snapshots") as store:
        store.put("t", KEY, BLOB)
        store.put("t", key_of(1), b"blob")
    for name in (NAME, f"kv/v1/t/{key_of(1)}"):
        found = client.head_object(Bucket=BUCKET, Key=name)
        assert found["ServerSideEncryption"] == "aws:kms"
        assert found["SSEKMSKeyId"] == "alias/snapshots"


def test_object_with_other_content_is_a_miss_and_is_removed(client: Any, store: KVStore) -> None:
    """Of the same length and with the metadata of before."""
    store.put("t", KEY, BLOB)
    metadata = client.head_object(Bucket=BUCKET, Key=NAME)["Metadata"]
    client.put_object(Bucket=BUCKET, Key=NAME, Body=BLOB[:-1] + b"x", Metadata=metadata)
    assert store.get("t", KEY) is None
    assert "Contents" not in client.list_objects_v2(Bucket=BUCKET)


def test_object_of_somebody_else_is_a_miss_and_stays(client: Any, store: KVStore) -> None:
    """It says nothing of its content."""
    client.put_object(Bucket=BUCKET, Key=NAME, Body=b"x")
    assert store.get("t", KEY) is None
    assert client.list_objects_v2(Bucket=BUCKET)["KeyCount"] == 1


def test_larger_blob_than_allowed_is_neither_sent_nor_read(
    store: KVStore, monkeypatch: pytest.MonkeyPatch, s3_url: str
) -> None:
    """Whoever put it."""
    store.put("t", KEY, bytes(11))
    with s3_store(monkeypatch, s3_url, max_blob_bytes=10) as small:
        assert small.get("t", KEY) is None
        with pytest.raises(StoreError, match=r"^s3: a blob has more than 10 bytes$"):
            small.put("t", KEY, bytes(11))


def test_deletion_goes_through_all_pages(
    client: Any, store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few objects S3 lists at once."""
    monkeypatch.setattr(snapshot_store, "_PAGE_OBJECTS", 3)
    names = [*(f"kv/v1/t/{key_of(number)}" for number in range(10)), "kv/v1/other", "kv/v1/t2/x"]
    for name in names:
        client.put_object(Bucket=BUCKET, Key=name, Body=b"x")
    assert store.delete_namespace("t") == 10
    left = [found["Key"] for found in client.list_objects_v2(Bucket=BUCKET)["Contents"]]
    assert left == ["kv/v1/other", "kv/v1/t2/x"]


def test_missing_bucket_is_an_error(monkeypatch: pytest.MonkeyPatch, s3_url: str) -> None:
    """Not a miss: it will not be there after the next put either."""
    location = S3Location("no-such-bucket", "x")
    with s3_store(monkeypatch, s3_url, location=location) as store:
        for call in (
            lambda: store.get("t", KEY),
            lambda: store.put("t", KEY, b"blob"),
            lambda: store.delete_namespace("t"),
        ):
            with pytest.raises(StoreError, match=r"^s3: its bucket does not exist \(NoSuchBucket"):
                call()


def test_parts_are_asked_for_once_each(faulty: Faulty) -> None:
    """The first says how many there are."""
    assert faulty.store.get("t", KEY) == BLOB
    starts = {request.start for request in faulty.s3.requests}
    assert starts == {0, PART_BYTES, 2 * PART_BYTES}
    assert len(faulty.s3.requests) == 3


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault(status=403, code="AccessDenied"), "access is denied"),
        (Fault(status=503, code="SlowDown"), "S3 asks for fewer requests"),
        (Fault(status=500, code="secret words"), "S3 refused the request"),
        (Fault(send_bytes=1_000), "AWS cannot be reached"),
        (Fault(ignore_range=True), "the answer holds other bytes"),
    ],
)
@pytest.mark.parametrize("start", [0, PART_BYTES])
def test_part_that_fails_is_an_error(faulty: Faulty, fault: Fault, reason: str, start: int) -> None:
    """Which repeats nothing that the server said."""
    faulty.s3.fault_of = lambda request: fault if request.start == start else None
    with pytest.raises(StoreError, match=f"^s3: {reason}") as caught:
        faulty.store.get("t", KEY)
    assert "secret words" not in str(caught.value)


def test_flipped_byte_is_a_miss(faulty: Faulty) -> None:
    """Though this server removes nothing."""
    faulty.s3.fault_of = lambda request: Fault(flip=request.start == PART_BYTES)
    assert faulty.store.get("t", KEY) is None


def test_object_replaced_between_two_parts_is_an_error(faulty: Faulty) -> None:
    """Its parts would not belong together."""

    def replace(request: S3Request) -> None:
        if request.start:
            faulty.s3.objects[NAME] = BLOB[::-1]

    faulty.s3.fault_of = replace
    with pytest.raises(StoreError, match=r"^s3: was replaced in the meantime"):
        faulty.store.get("t", KEY)


@pytest.mark.parametrize("start", [0, PART_BYTES])
def test_server_that_sends_a_byte_at_a_time_is_given_up(
    monkeypatch: pytest.MonkeyPatch, start: int
) -> None:
    """It is never silent for long."""
    fake = FakeS3(headers={"x-amz-meta-sha256": hashlib.sha256(BLOB).hexdigest()})
    fake.objects[NAME] = BLOB
    fake.fault_of = lambda request: Fault(trickle=request.start == start)
    location = S3Location(FAKE_BUCKET, LOCATION.prefix)
    with (
        serving_s3(fake) as url,
        s3_store(monkeypatch, url, location=location, get_timeout_s=0.5) as store,
    ):
        begun_s = time.monotonic()
        with pytest.raises(StoreError, match=r"^s3: it took longer than 0\.5 s$"):
            store.get("t", KEY)
        assert time.monotonic() - begun_s < 10


def test_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every call."""
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(3) as executor:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        limits = {"get_timeout_s": 0.3, "put_timeout_s": 0.3, "delete_timeout_s": 0.3}
        with s3_store(monkeypatch, url, **limits) as store:
            begun_s = time.monotonic()
            calls: list[Future[Any]] = [
                executor.submit(store.get, "t", KEY),
                executor.submit(store.put, "t", KEY, BLOB),
                executor.submit(store.delete_namespace, "t"),
            ]
            for call in calls:
                with pytest.raises(StoreError, match=r"^s3: it took longer than 0\.3 s$"):
                    call.result(10)
            assert time.monotonic() - begun_s < 10


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"part_bytes": 1 << 20}, "part_bytes"),
        ({"num_parallel": 0}, "num_parallel"),
        ({"put_timeout_s": 0.0}, "put_timeout_s"),
        ({"kms_key_id": ""}, "kms_key_id"),
    ],
)
def test_values_that_cannot_be_are_refused(options: dict[str, Any], field: str) -> None:
    """The error names the field."""
    with pytest.raises(InvalidParameterError) as caught:
        S3StoreConfig(**({"location": LOCATION} | options))
    assert caught.value.field == field


def test_broken_configuration_of_the_sdk_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the store is made."""
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(StoreError, match=r"^s3: the AWS SDK's configuration: "):
        open_s3_store(S3StoreConfig(location=LOCATION))
