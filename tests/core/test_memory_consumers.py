"""The consumers of the in-memory broker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from outbox.codec import Codecs, JsonCodec
from outbox.errors import HandlerNotStarted
from outbox.memory import InMemoryBroker
from outbox.message import Delivery, Message
from outbox.retry import RetryPolicy
from outbox.subscription import Subscription


@pytest.mark.parametrize("lacks", ["body", "database"])
def test_messages_whose_handler_cannot_begin_wait_without_an_attempt(lacks: str) -> None:
    missing = {lacks}
    received: list[Delivery] = []

    class Codec(JsonCodec):
        def decode(self, data: bytes) -> Any:
            if "body" in missing:
                raise HandlerNotStarted("the storage does not answer")
            return super().decode(data)

    def handle(deliveries: Sequence[Delivery]) -> None:
        if "database" in missing:
            raise HandlerNotStarted("the database does not answer")
        received.extend(deliveries)

    broker = InMemoryBroker(codecs=Codecs(Codec()))
    broker.subscribe(Subscription(group="g", topic="orders", batch=2, retry=RetryPolicy(max_attempts=1)), handle)
    broker.send([Message(topic="orders", body=b"1"), Message(topic="orders", body=b"2")])
    for _ in range(3):
        assert broker.drain() == 2
        broker.advance(60)
    missing.clear()
    broker.drain()
    assert [(one.body, one.attempt) for one in received] == [(1, 1), (2, 1)]
    assert (broker.dead_letters, broker.groups.counts["failed"]) == ([], 0)
