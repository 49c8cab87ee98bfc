"""The messages that a receiver stores, sets aside and acknowledges; the source is a list, the broker a real one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence

import pytest
from kombu.connection import Connection
from kombu.entity import Queue
from kombu.message import Message as TransportMessage
from kombu.messaging import Producer

from outbox.contrib.receiving.sources.kombu import KombuSource
from outbox.contrib.receiving.sources.receiver import Received, Receiver, UnstorableMessage
from outbox.contrib.receiving.sources.source import Incoming, Source, convert, message_id_of
from outbox.errors import ConfigurationError, MessageTypeMismatch, ServiceUnavailable, UnknownTopic
from outbox.message import Message, SendReceipt
from outbox.names import MAX_BODY_BYTES
from outbox.topic import MessageType
from tests.broker.bench import FIFO, ConsumptionBench


@pytest.fixture
def bench(broker_url: str) -> Iterator[ConsumptionBench]:
    """A broker with the two topics."""
    bench = ConsumptionBench(broker_url)
    bench.declare("orders")
    bench.declare("poison")
    yield bench
    bench.close()


class ListSource:
    """Hands out what is not acknowledged."""

    def __init__(self, *messages: Incoming) -> None:
        self.messages = list(messages)
        self.fails = False

    def receive(self, limit: int, *, wait_seconds: float) -> Sequence[Incoming]:
        return self.messages[:limit]

    def acknowledge(self, messages: Sequence[Incoming]) -> None:
        if self.fails:
            raise ServiceUnavailable("the connection is gone")
        self.messages = self.messages[len(messages) :]

    def close(self) -> None:
        pass


def incoming(message_id: str, body: bytes = b"{}", **of: object) -> Incoming:
    return Incoming(message_id=message_id, body=body, where=f"message {message_id!r} of the list", **of)  # type: ignore[arg-type]


def stored(bench: ConsumptionBench, topic: str = "orders") -> list[bytes]:
    rows = bench.rows(
        "SELECT body FROM outbox.commit_log JOIN outbox.topic USING (topic_id) WHERE name = %s ORDER BY log_id", topic
    )
    return [bytes(body) for (body,) in rows]


def receiver(bench: ConsumptionBench, source: Source, **options: object) -> Receiver:
    return Receiver(source, bench.broker, **{"name": "partner", "topic": "orders", **options})  # type: ignore[arg-type]


def test_what_is_not_acknowledged_comes_again_and_is_stored_once(bench: ConsumptionBench) -> None:
    source = ListSource(*(incoming(f"m{n}", str(n).encode()) for n in range(5)))
    source.fails = True
    for _ in range(2):
        with pytest.raises(ServiceUnavailable):
            receiver(bench, source).run_once()
    source.fails = False
    # Among new ones now, and its sender repeats one, too.
    source.messages = [
        source.messages[3],
        source.messages[1],
        incoming("m5", b"5"),
        incoming("m5", b"5"),
        source.messages[0],
    ]
    assert receiver(bench, source).run_once() == Received(stored=5)
    assert (source.messages, stored(bench)) == ([], [b"0", b"1", b"2", b"3", b"4", b"5"])


def test_large_messages_are_stored_in_parts(bench: ConsumptionBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one call, a batch of them would exceed the deadline each time that the source delivers it."""
    send, calls = bench.broker.send, []

    def note_and_send(messages: Sequence[Message]) -> list[SendReceipt]:
        calls.append([len(one.body) for one in messages])
        return send(messages)

    monkeypatch.setattr(bench.broker, "send", note_and_send)
    half = MAX_BODY_BYTES // 2
    sizes = [half, half, 1, 2 * half, 1, half]
    source = ListSource(*(incoming(f"m{n}", bytes(size)) for n, size in enumerate(sizes)))
    assert receiver(bench, source).run_once() == Received(stored=6)
    assert calls == [[half, half], [1], [2 * half], [1, half]]
    assert [len(body) for body in stored(bench)] == sizes


def test_key_tag_and_headers_are_those_of_a_sink_or_a_cloud_event(bench: ConsumptionBench) -> None:
    plain = {"outbox-key": "k1", "outbox-tag": "paid", "outbox-header-Trace": "t", "x-other": "no"}
    event = {"ce-partitionkey": "k2", "ce-tag": "paid"}
    source = ListSource(incoming("a", headers=plain, content_type="application/json"), incoming("b", headers=event))
    receiver(bench, source).run_once()
    assert bench.rows("SELECT key, tag, headers, content_type FROM outbox.commit_log ORDER BY log_id") == [
        ("k1", "paid", {"Trace": "t", "received-id": "a"}, "application/json"),
        ("k2", "paid", {"received-id": "b"}, "application/octet-stream"),
    ]


def test_a_message_of_this_broker_that_comes_back_is_another_one(bench: ConsumptionBench) -> None:
    ours = Message(topic="orders", body=b"ours")
    bench.publish([ours])
    receiver(bench, ListSource(incoming(str(ours.message_id), b"back"))).run_once()
    assert stored(bench) == [b"ours", b"back"]


def test_senders_with_the_same_ids_are_distinguished_by_the_name() -> None:
    assert message_id_of("one", incoming("1")) == message_id_of("one", incoming("1"))
    assert message_id_of("one", incoming("1")) != message_id_of("two", incoming("1"))


STRUCTURED = "application/cloudevents+json; charset=utf-8"
TWO_SOURCES = {
    "kafka": [incoming("1", name.encode(), headers={"ce-id": "1", "ce-source": f"/{name}"}) for name in "ab"],
    "amqp": [
        incoming("1", name.encode(), headers={f"cloudEvents{by}id": "1", f"cloudEvents{by}source": f"/{name}"})
        for name, by in (("a", ":"), ("b", "_"))
    ],
    "structured": [
        incoming("", json.dumps({"id": "1", "source": f"/{name}"}).encode(), content_type=STRUCTURED) for name in "ab"
    ],
    "application": [incoming("1", name.encode(), sender=name) for name in "ab"],
    "same-text": [
        incoming("", source.encode(), headers={"ce-id": message_id, "ce-source": source})
        for source, message_id in (("/a", "/b/1"), ("/a/b", "/1"))
    ],
}


def test_one_id_of_two_senders_is_two_messages(bench: ConsumptionBench) -> None:
    """CloudEvents: the source and the id together are unique. Each event comes twice and is stored once."""
    for name, events in TWO_SOURCES.items():
        bench.declare(name)
        source = ListSource(*events, *events)
        receiver(bench, source, name=name, topic=name).run_once()
        assert (source.messages, stored(bench, name)) == ([], [event.body for event in events])
        headers = bench.rows(
            "SELECT DISTINCT headers FROM outbox.commit_log JOIN outbox.topic USING (topic_id) WHERE name = %s", name
        )
        assert len(headers) == len(events), "the headers name both"


def test_an_event_keeps_its_type_on_the_way_through_a_cloud_event() -> None:
    headers = {"ce-id": "1", "ce-source": "/shop", "ce-dataschema": "urn:event:order.paid:2"}
    found = dict(convert(incoming("1", headers=headers), "partner", "orders").headers)
    assert found == {
        "received-id": "1",
        "received-source": "/shop",
        "outbox-event": "order.paid",
        "outbox-event-version": "2",
    }


def test_an_id_without_a_sender_is_the_one_of_earlier_versions() -> None:
    """A message that was received before an upgrade is recognised after it."""
    known = "1318d9bc-b4a1-58ef-a66c-8d5ce0ba99a5"
    assert str(message_id_of("partner", incoming("1"))) == known
    assert str(message_id_of("partner", incoming("", headers={"CE-ID": "1"}))) == known
    assert str(message_id_of("partner", incoming("1", b"no JSON", content_type=STRUCTURED))) == known


BAD = [
    incoming("", b"no id"),
    incoming("k", b"long key", key="k" * 300),
    incoming("n", b"nul in key", key="\x00"),
    incoming("l", b"x" * (MAX_BODY_BYTES + 1)),
    incoming("", b'{"source": "/a", "id": "\\ud800"}', content_type=STRUCTURED),
]


@pytest.mark.parametrize("bad", BAD, ids=["no-id", "key", "nul", "long", "surrogate"])
def test_poison_stops_the_receiver_unless_there_is_a_place_for_it(bench: ConsumptionBench, bad: Incoming) -> None:
    source = ListSource(incoming("a", b"before"), bad, incoming("c", b"after"))
    with pytest.raises(UnstorableMessage, match="cannot be stored in topic 'orders'"):
        receiver(bench, source).run_once()
    assert source.messages[1] is bad, "it was not acknowledged"
    assert receiver(bench, source, poison_topic="poison").run_once() == Received(stored=2, put_aside=1)
    assert (source.messages, stored(bench)) == ([], [b"before", b"after"])
    assert stored(bench, "poison") == [bad.body[:MAX_BODY_BYTES]]
    [(headers,)] = bench.rows("SELECT headers FROM outbox.commit_log WHERE headers ? 'reason'")
    assert headers["body-bytes"] == str(len(bad.body)) and bad.where in headers["received-from"]


def test_a_body_that_cannot_be_decompressed_is_poison(bench: ConsumptionBench) -> None:
    """The transport's library refuses it before the receiver sees it."""
    with contextlib.closing(compressed("stopping")) as source:
        with pytest.raises(UnstorableMessage, match="cannot be stored in topic 'orders'"):
            receiver(bench, source).run_once()
    with contextlib.closing(compressed("continuing")) as source:
        assert receiver(bench, source, poison_topic="poison").run_once() == Received(stored=2, put_aside=1)
        assert source.receive(1, wait_seconds=0.1) == []
    assert (stored(bench), stored(bench, "poison")) == ([b"1", b"3"], [b"2"])


def compressed(queue: str) -> KombuSource:
    """A queue with three messages, of which the second one is not compressed as its header says."""
    with Connection("memory://") as connection:
        producer = Producer(connection.channel())
        for body, headers in ((b"1", {}), (b"2", {"compression": "application/x-gzip"}), (b"3", {})):
            producer.publish(
                body,
                routing_key=queue,
                exchange="",
                declare=[Queue(queue)],
                content_type="text/plain",
                content_encoding="binary",
                message_id=body.decode(),
                headers=headers,
            )
    return KombuSource(url="memory://", queue=queue)


def test_a_text_that_is_not_unicode_is_a_body() -> None:
    """Some transports give texts; a body that is no UTF-8 is then a matter of the handlers."""
    message = TransportMessage(body="\ud800", delivery_tag=1)
    assert KombuSource(url="memory://", queue="q")._incoming(message).body == b"\xed\xa0\x80"


def test_what_no_message_can_help_ends_the_receiver(bench: ConsumptionBench) -> None:
    bench.declare("bound", types=frozenset({MessageType.TRANSACTION}))
    bench.declare("steps", types=FIFO)
    source = ListSource(incoming("a"))
    with pytest.raises(UnknownTopic):
        receiver(bench, source, topic="nowhere", poison_topic="poison").run_once()
    with pytest.raises(MessageTypeMismatch):
        receiver(bench, source, topic="bound", poison_topic="poison").run_once()
    with pytest.raises(ConfigurationError):
        receiver(bench, source, poison_topic="orders")
    assert len(source.messages) == 1 and stored(bench, "poison") == []
