"""Kafka as sink and as source, on a real server that is killed and started again in the middle."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message

from outbox.contrib.forwarding.sinks.formats import format_named
from outbox.contrib.forwarding.sinks.kafka import KafkaSink
from outbox.contrib.forwarding.sinks.sink import NotAcknowledged, Rejected
from outbox.contrib.receiving.sources.kafka import KafkaSource
from outbox.contrib.receiving.sources.receiver import Received, Receiver
from outbox.errors import ConfigurationError, ServiceUnavailable
from tests.broker.bench import ConsumptionBench
from tests.kafka_server import Kafka
from tests.servers import free_ports
from tests.sinks.conftest import Spawn
from tests.sinks.support import delivery, storm
from tests.support import eventually

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(400)]
SINK = "outbox.contrib.forwarding.sinks.kafka.KafkaSink"
PLAIN = format_named("plain", binding="kafka")
_numbers = itertools.count()


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """A server that has started."""
    server = Kafka(tmp_path_factory.mktemp("kafka"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def topic(kafka: Kafka) -> str:
    """A topic of this test's own."""
    name = f"sink-{next(_numbers)}"
    kafka.create(name)
    return name


def written(kafka: Kafka, topic: str) -> list[Message]:
    """Everything in the topic, in order within each partition."""
    with closing(
        Consumer(
            {
                "bootstrap.servers": kafka.servers,
                "group.id": f"look-{next(_numbers)}",
                "auto.offset.reset": "earliest",
                "enable.partition.eof": True,
            }
        )
    ) as consumer:
        consumer.subscribe([topic])
        found: list[Message] = []
        ended: set[int | None] = set()
        while len(ended) < 4:
            for message in consumer.consume(1000, 1.0):
                if message.error() is None:
                    found.append(message)
                else:
                    ended.add(message.partition())
        return found


def text(value: str | bytes | None) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")


def entries(messages: list[Message]) -> list[dict[str, Any]]:
    return [
        {
            "id": text(dict(message.headers() or ())["message-id"]),
            "key": text(message.key()),
            **json.loads(message.value() or b""),
        }
        for message in messages
    ]


def test_a_message_that_cannot_be_encoded_is_rejected_alone(kafka: Kafka, topic: str) -> None:
    """A lone surrogate in the key, as a format of one's own may make it: UTF-8 does not allow it."""
    given = [PLAIN(delivery(key), topic) for key in ("a", "x", "b")]
    given[1] = replace(given[1], key="\ud800")
    with closing(KafkaSink(servers=kafka.servers)) as sink:
        first, second, third = sink.send(given)
    assert (first, third) == (None, None)
    assert isinstance(second, Rejected) and str(given[1].message_id) in str(second)
    assert {one["key"] for one in entries(written(kafka, topic))} == {"a", "b"}


def test_a_message_names_its_topic_and_its_key_is_in_one_partition(kafka: Kafka, topic: str) -> None:
    given = [delivery("k ü", tag="paid"), delivery("k ü"), delivery("")]
    with closing(KafkaSink(servers=kafka.servers)) as sink:
        assert [sink.send([PLAIN(one, topic)]) for one in given] == [[None]] * 3
    found = written(kafka, topic)
    ours = [message for message in found if message.key() == "k ü".encode()]
    assert len(found) == 3 and len({message.partition() for message in ours}) == 1
    headers = dict(ours[0].headers() or ())
    assert headers["message-id"] == str(given[0].message_id).encode()
    assert (headers["outbox-tag"], headers["content-type"]) == (b"paid", b"application/json")


def test_refusals_of_the_sink_and_of_the_server(kafka: Kafka, topic: str) -> None:
    with closing(KafkaSink(servers=kafka.servers, timeout_seconds=10)) as sink:
        large, unknown = delivery("a", body=b"x" * 2_000_000), delivery("b")
        error, other, good = sink.send([PLAIN(large, topic), PLAIN(unknown, "nowhere"), PLAIN(delivery("c"), topic)])
        assert isinstance(error, Rejected) and str(large.message_id) in str(error)
        assert isinstance(other, NotAcknowledged) and "'nowhere'" in str(other)
        assert good is None


def test_a_missing_server_uses_up_no_attempt() -> None:
    with closing(KafkaSink(servers=f"127.0.0.1:{free_ports(1)[0]}", timeout_seconds=0.5)) as sink:
        with pytest.raises(ServiceUnavailable, match="acknowledged no message"):
            sink.send([PLAIN(delivery(), "orders")])


def test_after_a_fatal_error_the_next_call_has_a_new_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    """librdkafka reports the error once, by `poll`, and refuses each later message."""
    given = [PLAIN(delivery(), "orders")]

    def fail(*_: object, **__: object) -> None:
        raise KafkaException(KafkaError(KafkaError._FATAL, "not allowed"))

    producers = iter(
        [
            SimpleNamespace(produce=lambda *_, **__: None, poll=fail),
            SimpleNamespace(produce=fail),
            SimpleNamespace(produce=lambda *_, on_delivery, **__: on_delivery(None, None)),
        ]
    )
    monkeypatch.setattr(KafkaSink, "_made", lambda _: next(producers))
    sink = KafkaSink(servers="h:1")
    with pytest.raises(ServiceUnavailable, match="not allowed"):
        sink.send(given)
    [error] = sink.send(given)
    assert isinstance(error, NotAcknowledged)
    assert sink.send(given) == [None]


def test_what_cannot_be_right() -> None:
    with pytest.raises(ConfigurationError, match="must not set acks"):
        KafkaSink(servers="h:1", config={"acks": "0"})
    with pytest.raises(ConfigurationError, match="refused"):
        KafkaSink(servers="h:1", config={"no.such": "0"})
    with pytest.raises(ConfigurationError, match=r"must not set enable.auto.commit"):
        KafkaSource(servers="h:1", topic="t", group="g", config={"enable.auto.commit": True})


@pytest.mark.parametrize("kills", [1, pytest.param(8, marks=pytest.mark.soak)])
def test_server_and_forwarder_killed_and_started_again(
    bench: ConsumptionBench, spawn: Spawn, kafka: Kafka, topic: str, kills: int
) -> None:
    given: dict[str, Any] = {"sink": SINK, "name": topic, "options": {"servers": kafka.servers, "timeout_seconds": 10}}
    given["subscription"] = {"batch": 20}

    def restart() -> None:
        kafka.kill()
        kafka.start()

    storm(bench, spawn, given, lambda: entries(written(kafka, topic)), restart, kills, size=2000)


def test_as_a_source_what_was_not_committed_comes_again_and_is_stored_once(
    bench: ConsumptionBench, kafka: Kafka, topic: str
) -> None:
    bench.declare("orders")
    with closing(KafkaSink(servers=kafka.servers)) as sink:
        sink.send([PLAIN(delivery(f"k{n}", body=str(n).encode()), topic) for n in range(50)])
    where: dict[str, Any] = {"servers": kafka.servers, "topic": topic, "group": "outbox"}
    first = KafkaSource(**where)
    eventually(
        lambda: first.receive(30, wait_seconds=1.0), within_seconds=60, what="some, which are never acknowledged"
    )
    first.close()
    for _ in range(2):
        source = KafkaSource(**where)
        receiver = Receiver(source, bench.broker, name="partner", topic="orders", batch=20)
        with closing(source):
            total = 0
            while total < 50 and (done := receiver.run_once(wait_seconds=10.0)) != Received():
                total += done.stored
    rows = bench.rows("SELECT body, key FROM outbox.commit_log")
    assert sorted((int(bytes(body)), key) for body, key in rows) == [(n, f"k{n}") for n in range(50)]
