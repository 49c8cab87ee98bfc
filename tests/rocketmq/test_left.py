"""The counts of a drained worker after a crash of the server, whose own counts of delayed messages are wrong then."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from outbox.message import Message
from outbox.rocketmq.broker import RocketMQBroker
from outbox.rocketmq.inspection import Timers, left
from outbox.topic import MessageType, Topic
from tests.rocketmq.conftest import running_server, unique
from tests.rocketmq.test_engine import consuming
from tests.rocketmq_server import PrivateRocketMQ
from tests.support import eventually


@pytest.fixture
def server(programs: Path) -> Iterator[PrivateRocketMQ]:
    """A server of this test's own, which is killed."""
    with running_server(programs) as server:
        yield server


def test_what_waits_for_its_time_is_counted_after_a_crash(server: PrivateRocketMQ) -> None:
    """Killed before it has stored its counts: it delivers all the same, and then counts less than nothing."""
    kinds = frozenset({MessageType.NORMAL, MessageType.DELAY})
    later, soon = (Topic(name=unique(name), types=kinds, queue_count=2) for name in ("later.", "soon."))
    for topic in (later, soon):
        server.admin.create_topic(topic)
    broker = RocketMQBroker(server.url, [later, soon], timeout_seconds=20)
    for number in range(5):
        # The later ones are not due before they are counted, however slow the machine is.
        for topic, seconds in ((later, 3600), (soon, 30)):
            delayed = Message(topic=topic.name, body=b"%d" % number, delay=timedelta(seconds=seconds))
            broker.send([delayed], timeout_seconds=20)
    broker.close()
    server.kill()
    server.start()
    timers, seen = Timers(), set[int]()

    def waiting(topic: Topic) -> list[str]:
        return left([server.admin], [], [topic.name], timers).waiting

    # After its start, the server reads the end of its log and then counts the last messages.
    expected = [f"5 messages on topic {later.name!r} wait for their delivery time"]
    eventually(lambda: waiting(later) == expected, within_seconds=15, what=lambda: str(waiting(later)))
    with consuming(server, soon, lambda delivery: seen.add(delivery.body)):
        eventually(lambda: seen == set(range(5)), within_seconds=90)
    # The server looks up to 15 s later at the messages that the consumer had received.
    eventually(lambda: waiting(soon) == [], within_seconds=60, what=lambda: str(waiting(soon)))
