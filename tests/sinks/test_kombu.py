"""The kombu sink on real servers: RabbitMQ and Redis, killed and started again in the middle."""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kombu.connection import Connection
from kombu.entity import Exchange, Queue
from kombu.message import Message

from outbox.contrib.forwarding.sinks.formats import format_named
from outbox.contrib.forwarding.sinks.forwarder import Forwarder
from outbox.contrib.forwarding.sinks.kombu import KombuSink
from outbox.contrib.forwarding.sinks.sink import NotAcknowledged, Rejected
from outbox.errors import ConfigurationError, PartialFailure, ServiceUnavailable
from tests.broker.bench import ConsumptionBench
from tests.servers import RabbitMQ, free_ports, private_redis
from tests.sinks.conftest import Spawn
from tests.sinks.support import delivery, storm

SINK = "outbox.contrib.forwarding.sinks.kombu.KombuSink"
PLAIN = format_named("plain", binding="amqp")
_numbers = itertools.count()


@pytest.fixture
def queue() -> str:
    """A queue of this test's own."""
    return f"sink-{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def rabbitmq(rabbitmq_server: RabbitMQ, queue: str) -> Iterator[str]:
    """Its URL; the queue is removed."""
    yield rabbitmq_server.url
    with Connection(rabbitmq_server.url) as connection:
        Queue(queue, channel=connection.default_channel).delete()


@contextlib.contextmanager
def sink(url: str, **options: Any) -> Iterator[KombuSink]:
    """Closed at the end."""
    with contextlib.closing(KombuSink(url=url, **options)) as made:
        yield made


def drained(url: str, queue: str) -> list[Message]:
    """Everything in the queue, in order."""
    with Connection(url) as connection:
        bound = Queue(queue, channel=connection.default_channel)
        found = []
        while (message := bound.get(no_ack=True)) is not None:
            found.append(message)
        return found


def entries(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [{"id": m.headers["outbox-message-id"], "key": m.headers["outbox-key"], **m.decode()} for m in messages]


@pytest.mark.slow
def test_a_message_is_persistent_and_names_its_topic(rabbitmq: str, queue: str) -> None:
    given = delivery("k ü", tag="paid")
    with sink(rabbitmq) as made:
        assert made.send([PLAIN(given, queue)]) == [None]
    [found] = drained(rabbitmq, queue)
    assert (found.body, found.content_type) == (b'{"n": 1}', "application/json")
    assert (found.properties["message_id"], found.properties["delivery_mode"]) == (str(given.message_id), 2)
    assert (found.headers["outbox-key"], found.headers["outbox-tag"]) == ("k ü", "paid")


@pytest.mark.slow
def test_what_no_queue_takes_is_not_acknowledged(rabbitmq: str, queue: str) -> None:
    with sink(rabbitmq, exchange="amq.topic", routing_key="{topic}.{key}") as made:
        [error] = made.send([PLAIN(delivery("a"), queue)])
        assert isinstance(error, NotAcknowledged) and f"'{queue}.a'" in str(error)
        with Connection(rabbitmq) as connection:
            bound = Queue(queue, Exchange("amq.topic"), f"{queue}.#", channel=connection.default_channel)
            bound.queue_declare()
            bound.queue_bind()
        assert made.send([PLAIN(delivery("a"), queue)]) == [None]
    assert len(drained(rabbitmq, queue)) == 1


@pytest.mark.slow
def test_a_missing_exchange_is_no_messages_fault_and_mended_without_a_restart(rabbitmq: str, queue: str) -> None:
    with sink(rabbitmq, exchange=queue, routing_key="x") as made:
        with pytest.raises(ServiceUnavailable, match="NOT_FOUND"):
            made.send([PLAIN(delivery(), "orders")])
        with Connection(rabbitmq) as connection:
            exchange = Exchange(queue, "fanout", channel=connection.default_channel)
            exchange.declare()
            Queue(queue, exchange, channel=connection.default_channel).declare()
        assert made.send([PLAIN(delivery(), "orders")]) == [None]


@pytest.mark.slow
def test_a_message_that_cannot_be_sent_is_rejected_and_the_others_arrive(rabbitmq: str, queue: str) -> None:
    """py-amqp raises struct.error for a content type of 300 bytes. AMQP allows no routing key of 400 bytes."""
    whole, broken = [delivery("a"), delivery("b")], delivery("t", content_type="t" * 300)
    with sink(rabbitmq) as made:
        with pytest.raises(struct.error):
            made.send([PLAIN(broken, queue)])
        with pytest.raises(PartialFailure) as failure:
            Forwarder(made, queue, PLAIN)([whole[0], broken, whole[1]])
    [(message_id, error)] = failure.value.errors.items()
    assert (message_id, type(error)) == (broken.message_id, Rejected)
    assert {one["key"] for one in entries(drained(rabbitmq, queue))} == {"a", "b"}
    longest = delivery("\N{LATIN SMALL LETTER U WITH DIAERESIS}" * 200)
    with sink(rabbitmq, exchange="amq.topic", routing_key="{key}") as made:
        [refused] = made.send([PLAIN(longest, queue)])
    assert isinstance(refused, Rejected) and str(longest.message_id) in str(refused) and "255" in str(refused)


def test_a_missing_server_uses_up_no_attempt() -> None:
    port = free_ports(1)[0]
    with sink(f"amqp://guest:s3cret@127.0.0.1:{port}//") as made:
        with pytest.raises(ServiceUnavailable) as failure:
            made.send([PLAIN(delivery(), "orders")])
    assert "s3cret" not in str(failure.value)


def test_what_cannot_be_right() -> None:
    with pytest.raises(ConfigurationError, match="for AMQP only"):
        KombuSink(url="redis://h/", exchange="shop")
    for wrong in ("{tag}", "{"):
        with pytest.raises(ConfigurationError, match="routing_key"):
            KombuSink(url="amqp://h/", routing_key=wrong)


def of_queue(url: str, queue: str) -> dict[str, Any]:
    return {"sink": SINK, "name": queue, "options": {"url": url}, "subscription": {"batch": 10}}


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, pytest.param(8, marks=pytest.mark.soak)])
def test_rabbitmq_killed_and_started_again(
    bench: ConsumptionBench, spawn: Spawn, rabbitmq_server: RabbitMQ, rabbitmq: str, queue: str, kills: int
) -> None:
    def restart() -> None:
        rabbitmq_server.kill()
        rabbitmq_server.start()

    storm(bench, spawn, of_queue(rabbitmq, queue), lambda: entries(drained(rabbitmq, queue)), restart, kills)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.soak)])
def test_redis_killed_and_started_again(
    bench: ConsumptionBench, spawn: Spawn, tmp_path: Path, queue: str, kills: int
) -> None:
    server = private_redis(tmp_path, "--appendonly", "yes", "--appendfsync", "always")

    def restart() -> None:
        server.kill()
        server.__enter__()

    with server as path:
        url = f"redis+socket://{path}"
        storm(bench, spawn, of_queue(url, queue), lambda: entries(drained(url, queue)), restart, kills)
