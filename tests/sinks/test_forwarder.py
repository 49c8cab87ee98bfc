"""The reaction of a forwarder to the results of a sink; the sink is a list."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from uuid import UUID

import pytest

from outbox.broker.operations.rules import survey
from outbox.codec import REFERENCE_CONTENT_TYPE, UnreadBody
from outbox.contrib.forwarding.sinks import forwarder
from outbox.contrib.forwarding.sinks.formats import format_named
from outbox.contrib.forwarding.sinks.forwarder import Forwarder, RawCodecs, subscription
from outbox.contrib.forwarding.sinks.sink import EarlierNotAcknowledged, Outgoing, Rejected
from outbox.errors import HandlerNotStarted, LeaseLost, PartialFailure, ServiceUnavailable
from outbox.message import Delivery, Message
from outbox.utils import fence
from tests.broker.bench import ConsumptionBench, keyed
from tests.sinks.support import GROUP, delivery
from tests.support import eventually

PLAIN = format_named("plain", binding="http")


class ListSink:
    """Keeps the messages it gets; `refuse` names rejected bodies, `away` means that it accepts no message."""

    binding = "http"
    batch = 10
    threads = 4

    def __init__(self) -> None:
        self.calls: list[list[Outgoing]] = []
        self.refuse: set[bytes] = set()
        self.away: ServiceUnavailable | None = None
        self._lock = threading.Lock()

    @property
    def sent(self) -> list[bytes]:
        return [message.body for call in self.calls for message in call]

    def send(self, messages: Sequence[Outgoing]) -> Sequence[Exception | None]:
        with self._lock:
            if self.away is not None:
                raise self.away
            self.calls.append([message for message in messages if message.body not in self.refuse])
            return [Rejected(f"{m.message_id} refused") if m.body in self.refuse else None for m in messages]

    def close(self) -> None:
        pass


@pytest.fixture
def sink() -> ListSink:
    return ListSink()


def errors_of(sink: ListSink, deliveries: Sequence[Delivery]) -> Mapping[UUID, Exception]:
    with pytest.raises(PartialFailure) as failure:
        Forwarder(sink, "orders", PLAIN)(deliveries)
    return failure.value.errors


def test_a_call_sends_one_message_per_key_at_a_time(sink: ListSink) -> None:
    given = [delivery("a", body=b"1"), delivery("a", body=b"2"), delivery("b", body=b"3"), delivery("", body=b"4")]
    Forwarder(sink, "orders", PLAIN)([*given, delivery("", body=b"5")])
    assert [[message.body for message in call] for call in sink.calls] == [[b"1", b"3", b"4", b"5"], [b"2"]]


def test_what_is_behind_a_refused_message_of_its_key_is_not_sent(sink: ListSink) -> None:
    given = [delivery(key, body=body) for key, body in (("a", b"1"), ("a", b"2"), ("a", b"3"), ("b", b"4"))]
    sink.refuse = {b"2"}
    errors = errors_of(sink, given)
    assert [type(errors.get(one.message_id)) for one in given] == [
        type(None),
        Rejected,
        EarlierNotAcknowledged,
        type(None),
    ]
    assert sink.sent == [b"1", b"4"]


def test_a_body_that_is_nested_too_deeply_is_rejected_alone(sink: ListSink) -> None:
    structured = format_named("cloudevents-structured", binding="http", source="/shop")
    deep = b"[" * 100_000 + b"]" * 100_000
    given = [delivery(key, body=body) for key, body in (("a", b"1"), ("b", deep), ("c", b"3"))]
    with pytest.raises(PartialFailure) as failure:
        Forwarder(sink, "orders", structured)(given)
    [(message_id, error)] = failure.value.errors.items()
    assert (message_id, type(error)) == (given[1].message_id, Rejected)
    assert len(sink.sent) == 2


def test_an_endpoint_that_is_away_is_nobodys_fault(sink: ListSink) -> None:
    sink.away = ServiceUnavailable("away")
    with pytest.raises(ServiceUnavailable):
        Forwarder(sink, "orders", PLAIN)([delivery("a"), delivery("b")])


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_body_that_cannot_be_read_now_holds_back_only_its_key(
    sink: ListSink, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, while the storage is away, what was acknowledged before would be sent again with every attempt."""
    asked: list[bytes] = []
    monkeypatch.setattr(forwarder, "_SLOW_SECONDS", 0.0 if is_slow else 3600.0)

    def unread(data: bytes) -> UnreadBody:
        asked.append(data)
        raise HandlerNotStarted("the storage is away")

    stored = [delivery(key, body=b"{}", content_type=REFERENCE_CONTENT_TYPE) for key in ("a", "c")]
    given = [delivery("a", body=b"1"), stored[0], delivery("a", body=b"3"), delivery("b", body=b"4"), stored[1]]
    with pytest.raises(PartialFailure) as failure:
        Forwarder(sink, "orders", PLAIN, unread=unread)(given)
    errors = failure.value.errors
    assert [type(errors.get(one.message_id)) for one in given] == [
        type(None),
        HandlerNotStarted,
        EarlierNotAcknowledged,
        type(None),
        HandlerNotStarted,
    ]
    assert sink.sent == [b"1", b"4"]
    assert len(asked) == (1 if is_slow else 2), "if one question was slow, each may take as long"
    with pytest.raises(HandlerNotStarted):
        Forwarder(sink, "orders", PLAIN, unread=unread)(stored[0])


def test_nothing_is_sent_by_a_former_owner(sink: ListSink) -> None:
    with fence.attempt(lambda: "the lease is over"), pytest.raises(LeaseLost):
        Forwarder(sink, "orders", PLAIN)([delivery()])
    assert sink.sent == []


def test_a_rejected_message_blocks_its_key_is_named_and_goes_when_it_is_taken(
    bench: ConsumptionBench, sink: ListSink
) -> None:
    bench.declare("orders", queues=1)
    sent = [Message(topic="orders", key=f"k{n % 4}", body=str(n).encode()) for n in range(40)]
    sink.refuse = {b"4"}
    bench.publish(sent)
    wanted = subscription(GROUP, "orders", sink, suspend_seconds=0.1)
    with bench.running((wanted, Forwarder(sink, "orders", PLAIN)), codecs=RawCodecs()):
        eventually(lambda: len(sink.sent) == 31, what=lambda: str(sink.sent))
        [blocked] = eventually(
            lambda: [one for one in survey(bench.run).verdict.conditions if one.name == "blocked_queue"]
        )
        assert blocked.evidence[0]["key"] == "k0" and str(sent[4].message_id) in str(blocked.evidence[0])
        sink.refuse = set()
        eventually(lambda: bench.lag(GROUP) == 0, what="all are forwarded")
    for key in range(4):
        assert [int(body) for body in sink.sent if int(body) % 4 == key] == list(range(key, 40, 4))
    bench.assert_conserved(GROUP)


def test_as_a_choice_a_rejected_message_is_a_dead_letter(bench: ConsumptionBench, sink: ListSink) -> None:
    bench.declare("orders")
    sent = keyed("orders", 8, 2)
    sink.refuse = {sent[2].body}
    bench.publish(sent)
    wanted = subscription(GROUP, "orders", sink, dead_letter=True)
    bench.run_until_idle(wanted, Forwarder(sink, "orders", PLAIN), codecs=RawCodecs())
    assert len(sink.sent) == 6, "the two with this body are given up"
    assert bench.rows("SELECT count(*) FROM outbox.dead_letter") == [(2,)]


def test_a_pause_requested_by_an_endpoint_is_an_outage_that_ends(bench: ConsumptionBench, sink: ListSink) -> None:
    bench.declare("orders")
    sent = keyed("orders", 20, 4)
    sink.away = ServiceUnavailable("too many requests", pause_seconds=0.5)
    bench.publish(sent)
    wanted = subscription(GROUP, "orders", sink)
    with bench.running((wanted, Forwarder(sink, "orders", PLAIN)), codecs=RawCodecs()):
        eventually(lambda: bench.rows("SELECT error FROM outbox.outage"), what="the outage is named")
        assert sink.sent == []
        sink.away = None
        eventually(lambda: bench.lag(GROUP) == 0, what="all are forwarded")
    assert len(sink.sent) == 20
    assert bench.rows("SELECT count(*) FROM outbox.failure") == [(0,)], "no attempt was used up"
