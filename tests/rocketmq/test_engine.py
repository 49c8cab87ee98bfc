"""The engine without Django: sending, consuming, refusing and giving up, on a real server."""

from __future__ import annotations

import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from outbox.codec import Codecs
from outbox.errors import HandlerNotStarted, InvalidMessage, NotSupported, PermanentError, UnknownTopic
from outbox.message import Delivery, Message
from outbox.ports import AnyHandler
from outbox.retry import RetryPolicy
from outbox.rocketmq import inspection
from outbox.rocketmq.broker import RocketMQBroker
from outbox.rocketmq.client import WireMessage
from outbox.rocketmq.consumer import RocketMQConsumers
from outbox.rocketmq.declarations import wire_name
from outbox.rocketmq.wire import PROPERTY
from outbox.subscription import Mode, Subscription
from outbox.topic import Topic
from outbox.transaction import Answer, Decision, EndStatus, EndTransaction, HalfTransaction
from tests.rocketmq.conftest import unique
from tests.rocketmq_server import PrivateRocketMQ
from tests.support import eventually

Topics = Callable[..., Topic]


@contextmanager
def producing(server: PrivateRocketMQ, *topics: Topic) -> Iterator[RocketMQBroker]:
    broker = RocketMQBroker(server.url, topics, timeout_seconds=20)
    try:
        yield broker
    finally:
        broker.close()


@contextmanager
def consuming(
    server: PrivateRocketMQ, topic: Topic, handler: AnyHandler, codecs: Codecs | None = None, **options: object
) -> Iterator[None]:
    given = {"group": unique("group"), "topic": topic.name, **options}
    subscription = Subscription(**given)  # type: ignore[arg-type]
    server.admin.create_group(subscription, topic)
    consumers = RocketMQConsumers(server.url, [(subscription, handler)], topics=[topic], codecs=codecs)
    stop = threading.Event()
    running = threading.Thread(target=consumers.run, args=[stop])
    running.start()
    try:
        yield
    finally:
        stop.set()
        running.join()


def message(topic: Topic, number: int, **fields: object) -> Message:
    return Message(topic=topic.name, body=str(number).encode(), **fields)  # type: ignore[arg-type]


def test_a_message_arrives_as_it_was_published(rocketmq: PrivateRocketMQ, new_topic: Topics) -> None:
    topic, seen = new_topic(), list[Delivery]()
    sent = message(topic, 1, key="a key\n", tag="paid", headers={"empty": "", "odd": "ü\x01"})
    with producing(rocketmq, topic) as broker, consuming(rocketmq, topic, seen.append):
        (receipt,) = broker.send([sent], timeout_seconds=20)
        eventually(lambda: seen, within_seconds=60)
    assert seen[0].message == sent
    assert (seen[0].body, seen[0].attempt, receipt.message_id) == (1, 1, sent.message_id)


def test_fifo_keeps_the_order_of_a_key_through_a_failure(rocketmq: PrivateRocketMQ, new_topic: Topics) -> None:
    topic, seen = new_topic("FIFO", queue_count=2), list[int]()

    def handle(delivery: Delivery) -> None:
        if delivery.body == 3 and delivery.attempt == 1:
            raise RuntimeError("once")
        seen.append(delivery.body)

    with producing(rocketmq, topic) as broker:
        for number in range(10):
            broker.send([message(topic, number, key="one")], timeout_seconds=20)
        retry = RetryPolicy(delays_seconds=[1])
        with consuming(rocketmq, topic, handle, mode=Mode.ORDERLY, retry=retry):
            eventually(lambda: len(seen) == 10, within_seconds=90, what=lambda: str(seen))
    assert seen == list(range(10))


def test_a_delay_is_waited_for(rocketmq: PrivateRocketMQ, new_topic: Topics) -> None:
    topic, seen = new_topic("DELAY", "NORMAL"), list[int]()

    def handle(delivery: Delivery) -> None:
        seen.append(delivery.body)

    with producing(rocketmq, topic) as broker, consuming(rocketmq, topic, handle):
        broker.send([message(topic, 1, delay=timedelta(seconds=6))], timeout_seconds=20)
        broker.send([message(topic, 2)], timeout_seconds=20)
        eventually(lambda: len(seen) == 2, within_seconds=60)
    assert seen == [2, 1]


def test_after_the_last_attempt_it_is_a_dead_letter(rocketmq: PrivateRocketMQ, new_topic: Topics) -> None:
    """In the server's own dead letters of the group: it is not delivered again, and the other messages continued."""
    topic, attempts = new_topic(), Counter[int]()

    def handle(delivery: Delivery) -> None:
        attempts[delivery.body] += 1
        if delivery.body == 1:
            raise RuntimeError("always")

    retry = RetryPolicy(delays_seconds=[1], max_attempts=2)
    with producing(rocketmq, topic) as broker, consuming(rocketmq, topic, handle, retry=retry):
        broker.send([message(topic, 1)], timeout_seconds=20)
        broker.send([message(topic, 2)], timeout_seconds=20)
        eventually(lambda: attempts[1] == 2 and attempts[2] == 1, within_seconds=60)
        broker.send([message(topic, 3)], timeout_seconds=20)
        eventually(lambda: attempts[3] == 1, within_seconds=60)
    assert attempts == {1: 2, 2: 1, 3: 1}


def test_a_dead_letter_that_cannot_be_read_hides_no_other(rocketmq: PrivateRocketMQ, new_topic: Topics) -> None:
    """Another program has sent it, and the group has given it up."""
    topic, group = new_topic(), unique("group")

    def handle(delivery: Delivery) -> None:
        raise PermanentError("always")

    foreign = WireMessage()
    foreign.topic, foreign.body = wire_name(topic.name), b"foreign"
    foreign.add_property(PROPERTY, "no JSON")
    retry = RetryPolicy(delays_seconds=[1], max_attempts=1)
    with (
        producing(rocketmq, topic) as broker,
        consuming(rocketmq, topic, handle, group=group, retry=retry),
    ):
        broker._started().send(foreign)
        broker.send([message(topic, 1)], timeout_seconds=20)
        eventually(lambda: inspection.count_dead_letters([rocketmq.admin], group) == 2, within_seconds=60)
    letters = {one.message.body: one for one in inspection.dead_letters([rocketmq.admin], group)}
    assert (letters[b"1"].problem, letters[b"1"].message.content_type) == ("", "application/json")
    assert "JSONDecodeError" in letters[b"foreign"].problem
    assert letters[b"foreign"].message.topic == wire_name(topic.name)


class WaitingCodecs(Codecs):
    """They cannot read the first bodies yet, like those of a process whose key database is down."""

    waits = 5

    def decode(self, content_type: str, data: bytes) -> Any:
        if self.waits:
            self.waits -= 1
            raise HandlerNotStarted("the keys of subjects cannot be read")
        return super().decode(content_type, data)


def test_a_body_that_cannot_be_read_now_uses_up_no_attempt(rocketmq: PrivateRocketMQ, new_topic: Topics) -> None:
    topic, seen = new_topic(), list[Delivery]()
    retry = RetryPolicy(delays_seconds=[1], max_attempts=2)
    with (
        producing(rocketmq, topic) as broker,
        consuming(rocketmq, topic, seen.append, WaitingCodecs(), retry=retry),
    ):
        broker.send([message(topic, 1)], timeout_seconds=20)
        eventually(lambda: seen, within_seconds=60)
    assert [(one.body, one.attempt) for one in seen] == [(1, 1)]


def test_320_undecided_at_once_are_all_answered(rocketmq: PrivateRocketMQ, new_topic: Topics) -> None:
    """Half of them committed, half rolled back, none reported: every check is answered, no other message is seen."""
    topic, seen, group = new_topic("TRANSACTION"), Counter[int](), unique("shop")
    halves = [HalfTransaction(producer_group=group, messages=[message(topic, number)]) for number in range(320)]
    committed = {half.transaction_id for half in halves[::2]}
    answered: set[object] = set()

    def answer(broker: RocketMQBroker) -> bool:
        checks = broker.claim_checks(group)
        answered.update(check.transaction_id for check in checks)
        broker.report_answers(group, [_answer(check.transaction_id in committed, check) for check in checks])
        return len(answered) == 320 and len(seen) >= 160

    def note(delivery: Delivery) -> None:
        seen[delivery.body] += 1

    with producing(rocketmq, topic) as broker, consuming(rocketmq, topic, note):
        for half in halves:
            broker.send_half(half, timeout_seconds=20)
        eventually(lambda: answer(broker), within_seconds=120, what=lambda: f"{len(answered)} {len(seen)}")
    assert set(seen) == set(range(0, 320, 2))


def _answer(is_committed: bool, check: object) -> Answer:
    decision = Decision.COMMIT if is_committed else Decision.ROLLBACK
    return Answer(transaction_id=check.transaction_id, decision=decision)  # type: ignore[attr-defined]


def test_an_end_is_accepted_once_and_by_its_sender_only(rocketmq: PrivateRocketMQ, new_topic: Topics) -> None:
    topic = new_topic()
    half = HalfTransaction(producer_group="shop", messages=[message(topic, 1)])
    end = EndTransaction(transaction_id=half.transaction_id, decision=Decision.COMMIT, producer_group="shop")
    with producing(rocketmq, topic) as broker, producing(rocketmq, topic) as other:
        broker.send_half(half, timeout_seconds=20)
        assert other.end([end]) == [EndStatus.LEFT_TO_CHECK]
        assert broker.end([end, end]) == [EndStatus.ACCEPTED, EndStatus.LEFT_TO_CHECK]


def test_what_it_cannot_send_is_refused(rocketmq: PrivateRocketMQ, new_topic: Topics) -> None:
    topic = new_topic()
    missing = Topic(name=unique("missing"))
    with producing(rocketmq, topic, missing) as broker:
        with pytest.raises(NotSupported, match="one by one"):
            broker.send([message(topic, 1), message(topic, 2)])
        with pytest.raises(InvalidMessage, match="empty body"):
            broker.send([Message(topic=topic.name, body=b"")])
        with pytest.raises(InvalidMessage, match="headers and key"):
            broker.send([message(topic, 1, headers={f"h{n}": "x" * 4000 for n in range(5)})])
        with pytest.raises(UnknownTopic, match="create it"):
            broker.send([message(missing, 1)], timeout_seconds=20)
        with pytest.raises(UnknownTopic, match="not declared"):
            broker.send([Message(topic="undeclared", body=b"1")])
        assert [text for text in broker.topic_problems() if "has no topic" in text]


def test_a_fork_of_a_used_client_gets_an_error_instead_of_waiting(rocketmq: PrivateRocketMQ, new_topic: Topics) -> None:
    topic = new_topic()
    with producing(rocketmq, topic) as broker:
        broker.send([message(topic, 1)], timeout_seconds=20)
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            # Newer Pythons warn of just this.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                broker.send([message(topic, 2)])
            except Exception as error:
                os.write(writer, str(error).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as answer:
            text = answer.read()
        os.waitpid(pid, 0)
    assert "fork" in text
