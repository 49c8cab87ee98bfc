"""RocketMQ under the contract suite: the face of tests/contract/benches.py, waiting where the server takes its time."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Sequence

from outbox.message import Delivery, Message
from outbox.ports import AnyHandler, Consumers, call_handler
from outbox.rocketmq.broker import RocketMQBroker
from outbox.rocketmq.consumer import RocketMQConsumers
from outbox.subscription import Subscription
from outbox.topic import Topic
from outbox.transaction import Check
from tests.contract.benches import CHECKS, publish_two_phase
from tests.rocketmq_server import PrivateRocketMQ

# Longer than the server waits before it asks (twice), than a retry, and than an empty poll (5 s).
QUIET_SECONDS = 8.0


class AskedBroker(RocketMQBroker):
    """Waits for the checks that the suite expects at once."""

    def claim_checks(self, producer_group: str, *, limit: int = 500) -> list[Check]:
        found: dict[uuid.UUID, Check] = {}
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < QUIET_SECONDS:
            new = {check.transaction_id: check for check in super().claim_checks(producer_group, limit=limit)}
            if set(new) - set(found):
                quiet_since = time.monotonic()
            found |= new
            time.sleep(0.05)
        return list(found.values())


class RocketMQBench:
    """Topics of this test's own, under the suite's names."""

    def __init__(self, server: PrivateRocketMQ, topics: Sequence[Topic]) -> None:
        self._server = server
        self._topics = {topic.name: topic for topic in topics}
        for topic in topics:
            server.admin.create_topic(topic)
        self.broker = AskedBroker(server.url, topics, check=CHECKS, timeout_seconds=20)
        self._subscriptions: list[tuple[Subscription, AnyHandler]] = []

    def publish(self, messages: Sequence[Message], *, commit: bool) -> None:
        for message in messages:
            # One transaction each: in one they would do as well, but an end that is slow holds up the next.
            publish_two_phase(self.broker, [message], commit=commit)

    def visible(self, topic: str) -> list[Message]:
        """Consumed by a group of its own until no more messages come; copies once, as the inbox has them."""
        seen: dict[uuid.UUID, Message] = {}

        def note(delivery: Delivery) -> None:
            seen.setdefault(delivery.message_id, delivery.message)

        subscription = Subscription(group=f"probe-{uuid.uuid4().hex[:8]}", topic=topic)
        self._consume([(subscription, note)], lambda: len(seen))
        return list(seen.values())

    def incidents(self) -> list[str]:
        return []

    def let_time_pass(self, seconds: float) -> None:
        raise NotImplementedError("the server has a clock of its own")

    def subscribe(self, subscription: Subscription, handler: AnyHandler) -> None:
        self._server.admin.create_group(subscription, self._topics[subscription.topic])
        self._subscriptions.append((subscription, handler))

    def drain(self) -> None:
        handled: list[int] = []

        def counting(handler: AnyHandler) -> AnyHandler:
            def call(given: object) -> None:
                handled.append(1)
                handler(given)  # type: ignore[arg-type]

            return call

        self._consume([(wanted, counting(handler)) for wanted, handler in self._subscriptions], lambda: len(handled))

    def consumers(self, *wanted: tuple[Subscription, AnyHandler]) -> Consumers:
        for subscription, _ in wanted:
            self._server.admin.create_group(subscription, self._topics[subscription.topic])
        return RocketMQConsumers(self._server.url, wanted, topics=list(self._topics.values()), invoker=call_handler)

    def _consume(self, wanted: Sequence[tuple[Subscription, AnyHandler]], progress: object) -> None:
        consumers = self.consumers(*wanted)
        stop = threading.Event()
        running = threading.Thread(target=consumers.run, args=[stop])
        running.start()
        try:
            before, quiet_since = -1, time.monotonic()
            while time.monotonic() - quiet_since < QUIET_SECONDS:
                now = progress()  # type: ignore[operator]
                if now != before:
                    before, quiet_since = now, time.monotonic()
                time.sleep(0.05)
        finally:
            stop.set()
            running.join()

    def dead_letters(self, group: str) -> list[tuple[uuid.UUID, str]]:
        raise NotImplementedError("they are in the server's own topic")

    def totals_differ(self) -> list[str]:
        return []

    def close(self) -> None:
        self.broker.close()
