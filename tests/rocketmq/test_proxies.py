"""Two proxies, one of which cannot be reached any more: the clients of a process move to the other one."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence

import pytest

from outbox.errors import BrokerError
from outbox.message import Delivery, Message
from outbox.rocketmq.address import parse
from outbox.rocketmq.broker import RocketMQBroker
from outbox.rocketmq.consumer import RocketMQConsumers
from outbox.rocketmq.producer import AnsweringThread
from outbox.subscription import Subscription
from outbox.topic import Topic
from outbox.transaction import Answer, Check, Decision, HalfTransaction
from sample_project.rocketmq_server import PrivateRocketMQ
from tests.rocketmq.conftest import unique
from tests.rocketmq.link import Link
from tests.support import eventually


@pytest.fixture
def links(rocketmq: PrivateRocketMQ) -> Iterator[list[Link]]:
    """Two ways to the proxy of the run's server."""
    [proxy] = parse(rocketmq.url).proxies
    made = [Link(proxy.port), Link(proxy.port)]
    yield made
    for link in made:
        link.close()


class Committed:
    """A checker for which every transaction has committed."""

    def check_local_transactions(self, checks: Sequence[Check]) -> Iterable[Answer]:
        for check in checks:
            yield Answer(transaction_id=check.transaction_id, decision=Decision.COMMIT)


def test_clients_leave_a_proxy_whose_network_is_cut(rocketmq: PrivateRocketMQ, links: list[Link]) -> None:
    """The connections stay open, so only missing answers show the cut. Checks come through the other proxy, too."""
    topic, group, seen = Topic(name=unique("orders."), queue_count=2), unique("group"), list[Delivery]()
    subscription = Subscription(group=group, topic=topic.name)
    rocketmq.admin.create_topic(topic)
    rocketmq.admin.create_group(subscription, topic)
    proxies = ",".join(f"127.0.0.1:{link.port}" for link in links)
    url = f"rocketmq://{proxies}?{rocketmq.url.partition('?')[2]}"
    broker = RocketMQBroker(
        url,
        [topic],
        timeout_seconds=3,
        answering=lambda producer: AnsweringThread(producer, lambda: broker, "shop", Committed),
    )
    consumers = RocketMQConsumers(url, [(subscription, seen.append)], topics=[topic])
    stop = threading.Event()
    consuming = threading.Thread(target=consumers.run, args=[stop])
    consuming.start()
    try:
        broker.send([Message(topic=topic.name, body=b"1", key="before")], timeout_seconds=20)
        eventually(lambda: [one.message.key for one in seen] == ["before"], within_seconds=60)
        used = [link for link in links if link.is_used()]
        for link in used:
            link.cut()
        assert len(used) == 1

        def is_sent() -> bool:
            try:
                broker.send([Message(topic=topic.name, body=b"2", key="after")], timeout_seconds=3)
            except BrokerError:
                return False
            return True

        eventually(is_sent, within_seconds=90)
        eventually(lambda: {one.message.key for one in seen} == {"before", "after"}, within_seconds=90)
        half = HalfTransaction(producer_group="shop", messages=[Message(topic=topic.name, body=b"3", key="open")])
        broker.send_half(half, timeout_seconds=20)
        eventually(lambda: {one.message.key for one in seen} == {"before", "after", "open"}, within_seconds=90)
    finally:
        stop.set()
        for link in links:
            link.mend()
        consuming.join()
        broker.close()
