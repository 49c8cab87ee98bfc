"""Bad input gets its specific error before anything is stored."""

from __future__ import annotations

import os
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import pytest

from outbox.codec import BytesCodec, Codecs, JsonCodec
from outbox.errors import (
    BodyTooLarge,
    ConfigurationError,
    HandlerNotStarted,
    InvalidMessage,
    InvalidName,
    MessageTypeMismatch,
    OutboxError,
    UndecodableBody,
    UnserialisableBody,
)
from outbox.message import Message
from outbox.retry import RetryPolicy
from outbox.subscription import Subscription
from outbox.topic import MessageType, Topic, select_shard
from outbox.utils.ids import uuid7


class Region(str, Enum):  # noqa: UP042 (an f-string shows the text of a StrEnum)
    EU = "eu"


def test_a_member_of_an_enum_is_the_text_that_is_stored() -> None:
    """As a key or a name, which f-strings and formats put into locks and names."""
    sent = Message(topic=Region.EU, body=b"", key=Region.EU, tag=Region.EU)
    subscription = Subscription(topic=Region.EU, group=Region.EU)
    texts = (sent.topic, sent.key, sent.tag, subscription.topic, subscription.group, Topic(name=Region.EU).name)
    assert [f"{text}" for text in texts] == ["eu"] * 6


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"topic": "order paid"}, InvalidName, "order paid"),
        ({"topic": "%RETRY%logistics"}, InvalidName, "%RETRY%"),
        ({"topic": "x" * 128}, InvalidName, "127"),
        ({"key": "k" * 256}, InvalidName, "255"),
        ({"key": 7}, InvalidName, r"str\(value\)"),
        ({"tag": "a|b"}, InvalidName, "'|'"),
        ({"headers": {"re gion": "eu"}}, InvalidName, "re gion"),
        ({"headers": {"region": 7}}, InvalidName, "region"),
        ({"headers": ["region"]}, InvalidName, "mapping"),
        ({"headers": {"region": "\ud800"}}, InvalidName, "topic 'orders': header 'region'"),
        ({"key": "\ud800"}, InvalidName, "topic 'orders': key"),
        ({"tag": "\ud800"}, InvalidName, "tag"),
        ({"tag": 0}, InvalidName, "tag 0"),
        ({"body": {"n": 1}}, InvalidMessage, "codec"),
        ({"body": b"x" * (4 * 1024 * 1024 + 1)}, BodyTooLarge, "4,194,305"),
        ({"deliver_at": datetime(2026, 1, 1)}, InvalidMessage, "time zone"),  # noqa: DTZ001
        ({"delay": 60}, InvalidMessage, "must be a timedelta"),
        ({"delay": timedelta(seconds=-1)}, InvalidMessage, "negative"),
        ({"delay": timedelta.max}, InvalidMessage, "9999"),
        ({"delay": timedelta(1), "deliver_at": datetime.now(UTC)}, InvalidMessage, "one of them"),
        ({"deliver_at": "2026-01-01"}, InvalidMessage, "must be a datetime"),
        ({"deliver_at": date(2026, 1, 1)}, InvalidMessage, "must be a datetime"),
        ({"deliver_at": datetime.max.replace(tzinfo=timezone(-timedelta(hours=1)))}, InvalidMessage, "9999"),
    ],
)
def test_message_that_cannot_be_sent(fields: dict[str, Any], error: type[OutboxError], says: str) -> None:
    with pytest.raises(error, match=says):
        Message(**{"topic": "orders", "body": b"{}", **fields})


def test_largest_body_is_allowed() -> None:
    assert len(Message(topic="orders", body=b"x" * 4 * 1024 * 1024).body) == 4 * 1024 * 1024


def test_json_writes_what_business_rows_hold() -> None:
    body = {
        "total": Decimal("12.50"),
        "at": datetime(2026, 1, 2, 3, tzinfo=UTC),
        "day": date(2026, 1, 2),
        "opens": time(8, 30),
        "lasts": timedelta(days=1, hours=2, microseconds=5),
        "early": -timedelta(minutes=90),
        "id": UUID(int=1),
    }
    encoded, content_type = Codecs().encode("orders", body)
    assert content_type == "application/json"
    assert JsonCodec().decode(encoded) == {
        "total": "12.50",
        "at": "2026-01-02T03:00:00+00:00",
        "day": "2026-01-02",
        "opens": "08:30:00",
        "lasts": "P1DT02H00M00.000005S",
        "early": "-P0DT01H30M00S",
        "id": "00000000-0000-0000-0000-000000000001",
    }


@pytest.mark.parametrize("body", [object(), float("nan"), {1, 2}, {("a",): 1}])
def test_unserialisable_body_names_topic_and_cause(body: object) -> None:
    with pytest.raises(UnserialisableBody, match=r"'orders'.*Nothing was published"):
        Codecs().encode("orders", body)


def test_codec_per_topic_and_content_type() -> None:
    codecs = Codecs(by_topic={"pictures": BytesCodec()})
    assert codecs.encode("pictures", b"\x89PNG") == (b"\x89PNG", "application/octet-stream")
    assert codecs.decode("application/octet-stream", b"\x89PNG") == b"\x89PNG"
    with pytest.raises(UndecodableBody, match=r"application/x-avro"):
        codecs.decode("application/x-avro", b"")
    with pytest.raises(HandlerNotStarted, match=r"application/vnd.outbox.new.* waits"):
        Codecs().decode("application/vnd.outbox.new", b"")
    with pytest.raises(UndecodableBody, match=r"not valid"):
        codecs.decode("application/json", b"{")


def test_whatever_a_codec_raises_is_an_undecodable_body() -> None:
    class Broken(BytesCodec):
        content_type = "application/x-broken"

        def decode(self, data: bytes) -> bytes:
            raise KeyError("schema 7")

    with pytest.raises(UndecodableBody, match=r"'application/x-broken' failed with KeyError: 'schema 7'"):
        Codecs(Broken()).decode("application/x-broken", b"")


def test_ids_increase_and_are_version_7() -> None:
    ids = [uuid7() for _ in range(20_000)]
    assert ids == sorted(ids)
    assert len(set(ids)) == len(ids)
    assert {(one.version, one.variant) for one in ids} == {(7, "specified in RFC 4122")}


def test_forked_process_uses_no_random_bits_of_its_parent() -> None:
    uuid7()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, uuid7().bytes)
        os._exit(0)
    os.waitpid(child, 0)
    random_bits = (1 << 62) - 1
    assert UUID(bytes=os.read(reading, 16)).int & random_bits != uuid7().int & random_bits
    os.close(reading)
    os.close(writing)


def test_topic_enforces_its_types() -> None:
    plain = Topic(name="plain", types=frozenset({MessageType.NORMAL}))
    fifo = Topic(name="steps", types=frozenset({MessageType.FIFO}))
    delayed = Topic(name="later", types=frozenset({MessageType.DELAY}))
    with pytest.raises(MessageTypeMismatch, match="add TRANSACTION"):
        plain.check_accepts(Message(topic="plain", body=b""), transactional=True)
    with pytest.raises(MessageTypeMismatch, match="add DELAY"):
        plain.check_accepts(Message(topic="plain", body=b"", deliver_at=datetime.now(UTC)), transactional=False)
    with pytest.raises(InvalidMessage, match="needs a key"):
        fifo.check_accepts(Message(topic="steps", body=b""), transactional=False)
    with pytest.raises(InvalidMessage, match="delayed messages only"):
        delayed.check_accepts(Message(topic="later", body=b""), transactional=False)


@pytest.mark.parametrize(
    "fields", [{"queue_count": 0}, {"queue_count": 1025}, {"types": frozenset()}, {"on_park": "x"}]
)
def test_wrong_topic_declaration(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="'orders'"):
        Topic(name="orders", **fields)


def test_shard_is_stable_across_processes_and_releases() -> None:
    assert select_shard(Message(topic="t", body=b"", key="order-1")) == 0x60B37FEF
    assert select_shard(Message(topic="t", body=b"")) is None
    assert select_shard(Message(topic="t", body=b"", key="k", shard=5)) == 5


def test_retry_policy_levels() -> None:
    policy = RetryPolicy()
    assert [policy.delay_seconds(attempt) for attempt in (1, 2, 3, 12, 16, 99)] == [10, 30, 60, 600, 7200, 7200]
    assert not policy.exhausted(15)
    assert policy.exhausted(16)
    assert not RetryPolicy(max_attempts=None).exhausted(10**6)
    with pytest.raises(ConfigurationError):
        RetryPolicy(delays_seconds=[])
