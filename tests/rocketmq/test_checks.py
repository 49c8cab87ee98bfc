"""Check-back on RocketMQ under what goes wrong: a proxy that comes late, and a server that gives up asking."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from outbox.message import Message
from outbox.rocketmq.answering import AnsweringThread
from outbox.rocketmq.broker import RocketMQBroker
from outbox.rocketmq.private_server import PrivateRocketMQ
from outbox.topic import MessageType, Topic
from outbox.transaction import Answer, Check, Decision, HalfTransaction
from tests.rocketmq.conftest import QUICK, unique
from tests.support import eventually

BOUND = frozenset({MessageType.NORMAL, MessageType.TRANSACTION})


class Noting:
    """A checker that knows of one transaction that it has committed, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: set[object] = set()

    def check_local_transactions(self, checks: list[Check]) -> list[Answer]:
        self.asked.update(check.transaction_id for check in checks)
        return [Answer(transaction_id=check.transaction_id, decision=Decision.COMMIT) for check in checks]


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
        eventually(lambda: "is not asked about topics" in caplog.text, within_seconds=60)
        server.start()
        for topic in topics:
            server.admin.create_topic(topic)
        late = RocketMQBroker(server.url, topics, timeout_seconds=20)
        # The proxy remembers for a while that a topic was missing.
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
