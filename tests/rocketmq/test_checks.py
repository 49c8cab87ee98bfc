"""Check-back on RocketMQ under what goes wrong: a proxy that comes late, and a server that gives up asking."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from outbox.message import Delivery, Message
from outbox.rocketmq import admin, stranded
from outbox.rocketmq.broker import RocketMQBroker
from outbox.rocketmq.producer import AnsweringThread
from outbox.topic import MessageType, Topic
from outbox.transaction import Answer, Check, CheckCounts, Decision, HalfTransaction
from outbox.utils import heartbeat
from tests.django import processes
from tests.rocketmq.conftest import QUICK, running_server, unique
from tests.rocketmq.project import expected, happened, make_project, nothing_lost_invented_or_doubled
from tests.rocketmq.test_engine import consuming
from tests.rocketmq_server import PrivateRocketMQ
from tests.support import eventually

BOUND = frozenset({MessageType.NORMAL, MessageType.TRANSACTION})


class Knowing:
    """A checker that answers from a table."""

    def __init__(self, decisions: Mapping[UUID, Decision]) -> None:
        self._decisions = decisions

    def check_local_transactions(self, checks: Sequence[Check]) -> Iterator[Answer]:
        for check in checks:
            yield Answer(transaction_id=check.transaction_id, decision=self._decisions[check.transaction_id])


class Noting:
    """A checker that knows one committed transaction and records the checks it got."""

    def __init__(self) -> None:
        self.asked: set[object] = set()

    def check_local_transactions(self, checks: Sequence[Check]) -> list[Answer]:
        self.asked.update(check.transaction_id for check in checks)
        return [Answer(transaction_id=check.transaction_id, decision=Decision.COMMIT) for check in checks]


def test_checks_are_answered_after_the_system_has_refused_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [RuntimeError("can't start new thread")]

    def start() -> None:
        if errors:
            raise errors.pop()

    answering: Any = SimpleNamespace(start=start)
    monkeypatch.setattr("outbox.rocketmq.client._started_in", None)
    monkeypatch.setattr("outbox.rocketmq.broker.CheckingProducer", lambda *_, **__: SimpleNamespace(startup=list))
    broker = RocketMQBroker("rocketmq://127.0.0.1:1", [], answering=lambda _: answering)
    with pytest.raises(RuntimeError):
        broker._started()
    assert broker._answerer is None
    assert broker._started() is broker._producer and broker._answerer is answering


def test_checks_that_reach_no_producer_are_answered_through_the_administration_ports(
    rocketmq: PrivateRocketMQ, new_topic: Callable[..., Topic]
) -> None:
    """The producer of this process ignores its checks, as if RocketMQ had not reached it."""
    topic = new_topic()
    broker = RocketMQBroker(rocketmq.url, [topic], timeout_seconds=20)
    group = unique("shop")
    halves = [
        HalfTransaction(producer_group=group, messages=[Message(topic=topic.name, body=b"1", key=key)])
        for key in ("committed", "rolled back", "runs")
    ]
    decisions = dict(
        zip((one.transaction_id for one in halves), (Decision.COMMIT, Decision.ROLLBACK, Decision.UNKNOWN), strict=True)
    )
    try:
        for half in halves:
            broker.send_half(half)
        assert broker.settle_unasked(group, Knowing(decisions)) == CheckCounts(), "RocketMQ has not asked yet"
        seen = list[Delivery]()
        with consuming(rocketmq, topic, seen.append):
            eventually(
                lambda: broker.settle_unasked(group, Knowing(decisions)).committed, within_seconds=60, what="a commit"
            )
            eventually(lambda: seen, within_seconds=60, what="the committed message")
            eventually(
                lambda: broker.settle_unasked(group, Knowing(decisions)) == CheckCounts(claimed=1, unknown=1),
                within_seconds=60,
                what="the others are decided",
            )
            assert {delivery.key for delivery in seen} == {"committed"}
    finally:
        broker.close()


def test_a_process_that_starts_before_its_proxy_is_asked_once_the_proxy_is_there(
    programs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its producer finds no route at its start. The half is another process's, which is gone."""
    server = PrivateRocketMQ(tmp_path, programs, broker=QUICK)
    topics = [Topic(name=unique(name), types=BOUND, queue_count=2) for name in ("orders.", "steps.")]
    checker = Noting()
    early: RocketMQBroker = RocketMQBroker(
        server.url,
        topics,
        timeout_seconds=2,
        answering=lambda producer: AnsweringThread(producer, lambda: early, "shop", lambda: checker),
    )
    try:
        assert early.claim_checks("shop") == [] and early.unrouted() == sorted(topic.name for topic in topics)
        eventually(lambda: "cannot send this process checks about topics" in caplog.text, within_seconds=60)
        server.start()
        for topic in topics:
            server.admin.create_topic(topic)
        late = RocketMQBroker(server.url, topics, timeout_seconds=20)
        # The proxy caches for a while that a topic was missing.
        eventually(lambda: not list(late.topic_problems()), within_seconds=60)
        halves = [
            HalfTransaction(producer_group="shop", messages=[Message(topic=topic.name, body=b"1")]) for topic in topics
        ]
        for half in halves:
            late.send_half(half, timeout_seconds=20)
        late.close()
        eventually(
            lambda: checker.asked == {half.transaction_id for half in halves},
            within_seconds=120,
            what=lambda: f"asked about {len(checker.asked)} of 2",
        )
        with caplog.at_level(logging.INFO):
            eventually(lambda: early.unrouted() == [], within_seconds=60)
    finally:
        early.close()
        server.kill()


@pytest.mark.slow
def test_a_worker_without_a_proxy_lives_and_is_not_ready(application: None, tmp_path: Path) -> None:
    """Its process for check-back goes round by itself: there is no broker's process that beats for it."""
    sign = tmp_path / "check.heartbeat"
    variables = {
        "DJANGO_SETTINGS_MODULE": "tests.rocketmq.worker_settings",
        "TEST_ROCKETMQ": "rocketmq://127.0.0.1:1?brokers=127.0.0.1:1",
        "TEST_TOPICS": "orders,steps,later",
        "TEST_GROUP": "effects",
        heartbeat.VARIABLE: str(sign),
    }
    with processes.process(["-m", "outbox.contrib.django.worker.child", "check"], quiet=True, variables=variables):
        eventually(sign.exists, within_seconds=60, what="the first sign")
        first = sign.stat().st_mtime_ns
        eventually(lambda: sign.stat().st_mtime_ns != first, within_seconds=60, what="another sign")
        assert not heartbeat.listen(sign).is_ready


@pytest.fixture
def forgetful(programs: Path) -> Iterator[PrivateRocketMQ]:
    """A server that gives up after two checks."""
    with running_server(programs, transactionCheckMax=2) as server:
        yield server


def given_up(server: PrivateRocketMQ, count: int) -> bool:
    return admin.end_of_queue(server.admin, stranded.TOPIC) == count


def test_what_rocketmq_gave_up_is_decided_by_the_ledger(forgetful: PrivateRocketMQ) -> None:
    """Each service settles its own transactions. It asks again about an undecided one, and not about a settled one.

    Another group of brokers does not answer. After a loss of messages, the stored offset is above the end of the queue.
    """
    topic = Topic(name=unique("orders."), types=BOUND, queue_count=2)
    forgetful.admin.create_topic(topic)
    messages = [Message(topic=topic.name, body=b"%d" % number, key=f"k{number}", tag="t") for number in range(4)]
    groups = ["shop", "shop", "shop", "other"]
    halves = [
        HalfTransaction(producer_group=group, messages=[one]) for group, one in zip(groups, messages, strict=True)
    ]
    gone = RocketMQBroker(forgetful.url, [topic], timeout_seconds=20)
    for half in halves:
        gone.send_half(half, timeout_seconds=20)
    gone.close()
    eventually(lambda: given_up(forgetful, 4), within_seconds=90)
    ids = [half.transaction_id for half in halves]
    decisions = {ids[0]: Decision.UNKNOWN, ids[1]: Decision.COMMIT, ids[2]: Decision.ROLLBACK, ids[3]: Decision.COMMIT}
    seen: list[Message] = []
    broker = RocketMQBroker(f"{forgetful.url},127.0.0.1:1", [topic], timeout_seconds=20)
    try:
        with consuming(forgetful, topic, lambda delivery: seen.append(delivery.message)):
            first = broker.settle_exhausted("shop", Knowing(decisions))
            assert first == CheckCounts(claimed=3, committed=1, rolled_back=1, unknown=1)
            assert stranded.waiting(forgetful.admin, "shop") == 3, "from the oldest that is undecided"
            decisions[ids[0]] = Decision.COMMIT
            assert broker.settle_exhausted("shop", Knowing(decisions)) == CheckCounts(claimed=1, committed=1)
            assert broker.settle_exhausted("shop", Knowing(decisions)) == CheckCounts()
            assert (stranded.waiting(forgetful.admin, "shop"), stranded.waiting(forgetful.admin, "other")) == (0, 1)
            broker.close()
            other = RocketMQBroker(forgetful.url, [topic], timeout_seconds=20)
            assert other.settle_exhausted("shop", Knowing(decisions)) == CheckCounts(), "it begins where that one ended"
            other.close()
            eventually(lambda: len(seen) == 2, within_seconds=60)
            forgetful.admin.store_offset(stranded.offsets_of("other"), stranded.TOPIC, 100)
            restored = RocketMQBroker(forgetful.url, [topic], timeout_seconds=20)
            assert restored.settle_exhausted("other", Knowing(decisions)) == CheckCounts(claimed=1, committed=1)
            restored.close()
            eventually(lambda: len(seen) == 3, within_seconds=60)
    finally:
        broker.close()
    assert stranded.waiting(forgetful.admin, "other") == 0
    seen.pop()
    assert sorted(seen, key=lambda one: one.body) == messages[:2]


def test_committed_while_no_process_could_answer(
    forgetful: PrivateRocketMQ, application: None, outbox_settings: Callable[..., None]
) -> None:
    """Producers die after their commits and before their ends. RocketMQ gives up; then a worker starts."""
    project = make_project(forgetful)
    outbox_settings(**project.outbox)
    ends = project.produced({"fell": "producer.before_end=kill@1", "back": "producer.after_half=kill@3"})
    assert set(ends.values()) == {-signal.SIGKILL}
    undecided = admin.end_of_queue(forgetful.admin, "RMQ_SYS_TRANS_HALF_TOPIC")
    assert undecided
    eventually(lambda: admin.end_of_queue(forgetful.admin, stranded.TOPIC) >= 2, within_seconds=90)
    assert expected() and not happened()
    with project.running(["-m", "outbox.contrib.django.worker.child", "check"]), project.consumer():
        nothing_lost_invented_or_doubled()
