"""The contract suite over the relay: every case that publishes in local transactions, and needs nothing RocketMQ lacks.

The other cases send half messages and ask for their outcomes. The relay has neither: its row is a part of the local
transaction.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import pytest
from django.db import transaction

from outbox.contrib.django import publish_messages
from outbox.contrib.django.engine import broker as broker_access
from outbox.contrib.rocketmq.relay_rows import rows_on
from outbox.contrib.rocketmq.relaying import Relay
from outbox.message import Message
from outbox.rocketmq import admin, consumer, producer, wire
from outbox.rocketmq.broker import is_rejected
from outbox.topic import MessageType, Topic
from tests.contract.benches import Bench
from tests.rocketmq.bench import RocketMQBench
from tests.rocketmq.conftest import unique
from tests.rocketmq.relay_project import Undone
from tests.rocketmq.test_contract import LACKING, LACKING_MODULES, SUITE, here
from tests.rocketmq_server import PrivateRocketMQ
from tests.support import eventually

TOPICS: Mapping[str, Sequence[str]] = {
    "orders": ("FIFO", "TRANSACTION"),
    "steps": ("FIFO", "TRANSACTION"),
    "later": ("NORMAL", "DELAY", "TRANSACTION"),
}
# What half messages lack, and the relay has.
GAINED = {"test_messages_of_one_key_keep_their_order", "test_delayed_message_waits_for_its_time"}
SEND_SECONDS = 20


class RelayBench(RocketMQBench):
    """Local transactions on the database `default`, and one relay."""

    def __init__(self, server: PrivateRocketMQ) -> None:
        super().__init__(
            server,
            [Topic(name=name, types=frozenset(map(MessageType, types))) for name, types in TOPICS.items()],
        )
        self._relay = Relay(
            "default", broker_access.get_broker(), is_rejected, lease_seconds=60, send_seconds=SEND_SECONDS
        )

    def publish(self, messages: Sequence[Message], *, commit: bool) -> None:
        # A message of a FIFO topic needs a key, and the suite's messages on `orders` have none.
        keyed = [
            replace(one, key=one.key or f"k{number % 4}") if one.topic == "orders" else one
            for number, one in enumerate(messages)
        ]
        with suppress(Undone), transaction.atomic():
            publish_messages(keyed)
            assert rows_on("default").exists(), "the messages take the way over the relay"
            if not commit:
                raise Undone

    def visible(self, topic: str) -> list[Message]:
        self._send()
        return super().visible(topic)

    def drain(self) -> None:
        self._send()
        super().drain()

    def _send(self) -> None:
        def sent() -> bool:
            self._relay.run_once()
            return not rows_on("default").exists()

        eventually(sent, within_seconds=60, what=lambda: str(list(rows_on("default").values_list("key", "error"))))

    def close(self) -> None:
        self._relay.close()
        super().close()


@pytest.fixture
def any_path(
    rocketmq: PrivateRocketMQ,
    application: None,
    outbox_settings: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Bench]:
    """The relay; the server has every name of the suite under a prefix of this test's."""
    prefix = unique("r") + "-"
    for module in (admin, consumer, producer, wire):
        monkeypatch.setattr(module, "wire_name", lambda name: prefix + name)
    outbox_settings(
        BROKER=rocketmq.url,
        PRODUCER_GROUP="shop",
        SEND_TIMEOUT_SECONDS=SEND_SECONDS,
        TOPICS={name: {"types": list(types)} for name, types in TOPICS.items()},
    )
    bench = RelayBench(rocketmq)
    yield bench
    bench.close()
    broker_access.reset_broker()


def cases() -> Iterator[tuple[str, Callable[..., None]]]:
    """The tests of the suite that run here, by name."""
    for module in SUITE:
        if module not in LACKING_MODULES:
            for name, case in inspect.getmembers(module, inspect.isfunction):
                wanted = name.startswith("test_") and (name not in LACKING or name in GAINED)
                if wanted and "any_path" in inspect.signature(case).parameters:
                    yield name, case


for _name, _case in cases():
    globals()[_name] = _case if _name in GAINED else here(_name, _case)


def test_each_case_that_the_relay_gains_is_one_that_half_messages_lack() -> None:
    assert {name for name, _ in cases()} & set(LACKING) >= GAINED
