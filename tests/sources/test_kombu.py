"""The messages that a kombu source returns, from a real RabbitMQ."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from kombu.connection import Connection
from kombu.entity import Exchange, Queue
from kombu.messaging import Producer

from outbox.contrib.receiving.sources.kombu import KombuSource
from outbox.errors import ServiceUnavailable
from tests.servers import RabbitMQ

pytestmark = pytest.mark.slow
_numbers = itertools.count()


@pytest.fixture
def queue(rabbitmq_server: RabbitMQ) -> Iterator[str]:
    """A queue of this test's own, with the messages of the exchange amq.topic."""
    name = f"source-{os.getpid()}-{next(_numbers)}"
    with Connection(rabbitmq_server.url) as connection:
        queue = Queue(name, Exchange("amq.topic"), "#", channel=connection.default_channel)
        queue.queue_declare()
        queue.queue_bind()
        yield name
        queue.delete()


def publish(url: str, *given: dict[str, Any]) -> None:
    usual = {"body": b"{}", "exchange": "amq.topic", "routing_key": "x", "content_type": "text/plain"}
    with Connection(url) as connection:
        producer = Producer(connection.default_channel)
        for one in given:
            producer.publish(**usual | one)


def test_bodies_stay_unchanged(rabbitmq_server: RabbitMQ, queue: str) -> None:
    """By its content encoding, py-amqp would decode the last one to text that is not Unicode."""
    bodies = {"iso-8859-1": b"Zo\xeb", "utf-16": "Zoë".encode("utf-16"), "unicode_escape": rb"\ud800"}
    publish(rabbitmq_server.url, *({"body": body, "content_encoding": name} for name, body in bodies.items()))
    with closing(KombuSource(url=rabbitmq_server.url, queue=queue)) as source:
        found = [one.body for _ in bodies for one in source.receive(1, wait_seconds=10.0)]
    assert found == list(bodies.values())


@pytest.mark.parametrize("bad", ["content_type", "routing_key"])
def test_a_message_that_cannot_be_decoded_stops_only_the_later_ones(
    rabbitmq_server: RabbitMQ, queue: str, bad: str
) -> None:
    """Otherwise its error would end the receivers of all entries."""
    publish(rabbitmq_server.url, {}, {bad: b"\xff"}, {bad: b"\xff"})
    with closing(KombuSource(url=rabbitmq_server.url, queue=queue)) as source:
        [first] = source.receive(10, wait_seconds=10.0)
        source.acknowledge([first])
        for _ in range(2):
            with pytest.raises(ServiceUnavailable, match=f"{queue}.*Remove this message"):
                source.receive(10, wait_seconds=10.0)
            source.close()
