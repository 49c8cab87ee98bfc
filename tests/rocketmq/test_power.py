"""What a cluster loses of the messages that it has confirmed: killed processes, and machines without power."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from outbox.errors import BrokerError
from outbox.message import Message
from outbox.rocketmq.admin import read_stored
from outbox.rocketmq.broker import RocketMQBroker
from outbox.rocketmq.stranded import READER
from outbox.topic import Topic
from tests.rocketmq.cluster import BROKERS, RocketMQCluster
from tests.rocketmq.conftest import PROGRAMS, unique
from tests.rocketmq.test_cluster import VERSION
from tests.rocketmq_server import fetch_programs
from tests.support import eventually


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_only_all_machines_at_once_lose_confirmed_messages_and_not_with_sync_flush(
    flush: str, programs: Path, tmp_path: Path
) -> None:
    """The crash of all processes; then of the machines of both masters; then of all machines at the same moment."""
    topic = Topic(name=unique("orders."), queue_count=2)
    lost = dict[str, int]()
    jars = fetch_programs(PROGRAMS, VERSION)
    cluster = RocketMQCluster(tmp_path / "cluster", jars, disks=True, flushDiskType=flush)
    try:
        cluster.start()
        for admin in cluster.admins:
            admin.create_topic(topic)
        cluster.wait_for_topics([topic.name])
        for what in ("processes", "machines of both masters", "all machines"):
            with sending(cluster, topic) as confirmed:
                eventually(partial(has_grown, confirmed, 2_000), within_seconds=300, what="messages")
                victims = cluster.masters() if what == "machines of both masters" else list(BROKERS)
                cluster.kill(*victims)
                acknowledged = set(confirmed)
            for name in victims if what != "processes" else []:
                cluster.disks[name].lose_power()
            if what == "machines of both masters":
                cluster.wait_for_masters()
            cluster.start(*victims)
            lost[what] = len(lacking(acknowledged, cluster, topic))
            print(f"{flush}, {what}: {lost[what]} of {len(acknowledged)} confirmed messages are lost")
    finally:
        cluster.stop()
    assert (lost["processes"], lost["machines of both masters"]) == (0, 0)
    assert (lost["all machines"] == 0) is (flush == "SYNC_FLUSH")


@contextmanager
def sending(cluster: RocketMQCluster, topic: Topic) -> Iterator[list[str]]:
    """Threads that send messages outside of transactions. Gives the keys of those that RocketMQ has confirmed."""
    confirmed, numbers, stop = list[str](), itertools.count(), threading.Event()
    broker = RocketMQBroker(cluster.url, [topic], timeout_seconds=3)
    prefix = unique("m")

    def send() -> None:
        while not stop.is_set():
            key = f"{prefix}-{next(numbers)}"
            with suppress(BrokerError):
                broker.send([Message(topic=topic.name, body=b"1", key=key)], timeout_seconds=3)
                confirmed.append(key)

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        yield confirmed
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        broker.close()


def has_grown(confirmed: list[str], size: int) -> bool:
    """Whether RocketMQ has confirmed this number of messages."""
    return len(confirmed) >= size


def lacking(keys: set[str], cluster: RocketMQCluster, topic: Topic) -> set[str]:
    """The messages that the brokers lack, after they have had time to rebuild their queues."""
    with suppress(AssertionError):
        eventually(lambda: keys <= stored(cluster, topic), within_seconds=60)
    return keys - stored(cluster, topic)


def stored(cluster: RocketMQCluster, topic: Topic) -> set[str]:
    """The keys and ids of the messages that the brokers have. RocketMQ keeps both in one property, in any order."""
    return {
        key
        for admin in cluster.admins
        for queue in range(topic.queue_count)
        for message in read_stored(admin, READER, admin.name(topic.name), 0, queue)
        for key in message.properties.get("KEYS", "").split(" ")
    }
