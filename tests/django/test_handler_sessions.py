"""How many threads and sessions the handlers of a consumer process use."""

from __future__ import annotations

import threading

import pytest
from django.db import connections, transaction

from outbox import Delivery
from outbox.contrib.django import publish, subscriber
from outbox.contrib.django.engine.broker import get_engine
from outbox.contrib.django.subscribers.registry import subscriptions
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("no_subscribers")


def test_one_publisher_of_short_work_keeps_one_thread_with_one_session(
    empty_log: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A burst may use several. Then one message arrives per 20 ms, and all sessions but one are closed."""
    monkeypatch.setattr("outbox.broker.consumer.scheduler.IDLE_SECONDS", 0.5)
    used: list[tuple[int, int]] = []
    all_run = threading.Event()

    @subscriber("orders", group="effects", threads=4)
    def effect(given: Delivery) -> None:
        used.append((threading.get_ident(), connections["default"].connection.info.backend_pid))
        if given.body["number"] < 4:
            assert all_run.wait(20)

    def order(number: int) -> None:
        with transaction.atomic():
            publish("orders", {"number": number})

    def is_of_one() -> bool:
        """Whether one thread has handled the last second's messages, and no other one is left."""
        order(len(used))
        threads = [one for one in threading.enumerate() if one.name.startswith("effects-orders-")]
        return len(used) > 54 and len(set(used[-50:])) == 1 and len(threads) == 1

    stop = threading.Event()
    consumer = threading.Thread(target=get_engine().consumers(subscriptions(), leads=True).run, args=(stop,))
    consumer.start()
    try:
        for number in range(4):
            order(number)
        eventually(lambda: len(set(used)) == 4)
        all_run.set()
        # It publishes every 20 ms.
        eventually(is_of_one, what=lambda: str(used[-50:]))
    finally:
        all_run.set()
        stop.set()
        consumer.join(30)
