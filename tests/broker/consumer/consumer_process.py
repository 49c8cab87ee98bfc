"""A consumer process for tests: `python -m tests.broker.consumer.consumer_process '{"url": …, "name": …}'`.

Its handler writes a row of `effect` per message. `broken` runs it without one of its protections, to show that the
tests would notice.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outbox.broker.consumer.dispatcher import Dispatcher
from outbox.broker.consumer.owned_queue import OwnedQueue
from outbox.broker.consumer.runtime import ConsumerRuntime
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.leading import LeaderSettings, LeadingConsumer
from outbox.message import Delivery
from outbox.retry import RetryPolicy
from outbox.subscription import Mode, Subscription
from tests.broker.inbox import InboxInvoker

_EFFECT = "INSERT INTO effect (instance, queue, key, n, message_id, attempt) VALUES (%s, %s, %s, %s, %s, %s)"


def without_fencing() -> None:
    """Assume that every lease is held for ever."""
    OwnedQueue.trusted = lambda self: True  # type: ignore[method-assign]
    OwnedQueue.may_start = lambda self: True  # type: ignore[method-assign]


def without_drain() -> None:
    """Release queues at once, while their handlers still run."""

    def hand_over(self: Dispatcher, queue: OwnedQueue) -> None:
        queue.lose()
        self._owned.pop(queue.key, None)
        self._ownership.hand_back(queue.lease)

    Dispatcher._begin_hand_over = hand_over  # type: ignore[method-assign]
    OwnedQueue.may_start = lambda self: True  # type: ignore[method-assign]


BROKEN = {"": lambda: None, "no_fencing": without_fencing, "no_drain": without_drain}


class EffectHandler:
    """Writes effects, after `fail` failed attempts; waits `seconds` per call, or while the file `gate` is missing."""

    def __init__(self, invoker: InboxInvoker, options: dict[str, Any]) -> None:
        self._invoker = invoker
        self._name = options["name"]
        self._seconds = options.get("seconds", 0.0)
        self._gate = options.get("gate")
        self._fail = options.get("fail", 0)
        self._pause = threading.Event()

    def __call__(self, given: Delivery | Sequence[Delivery]) -> None:
        deliveries = [given] if isinstance(given, Delivery) else given
        for d in deliveries:
            if d.attempt <= self._fail:
                raise ValueError("told to fail")
            values = [self._name, d.queue, d.key, d.body["n"], d.message_id, d.attempt]
            self._invoker.connection.execute(_EFFECT, values)
        self._pause.wait(self._seconds)
        while self._gate and not Path(self._gate).exists():
            self._pause.wait(0.02)


def main() -> None:
    options = json.loads(sys.argv[1])
    logging.basicConfig(level=options.get("log", "ERROR"), format=f"{options['name']} %(message)s")
    BROKEN[options.get("broken", "")]()
    invoker = InboxInvoker(
        options["url"], once=options.get("inbox", True), idle_seconds=options.get("idle_seconds", 1.0)
    )
    subscription = Subscription(
        group=options.get("group", "g"),
        topic=options.get("topic", "orders"),
        mode=Mode(options.get("mode", "concurrent")),
        batch=options.get("batch", 1),
        threads=options.get("threads", 4),
        filter=options.get("filter", ""),
        suspend_seconds=0.1,
        retry=RetryPolicy(delays_seconds=[0.1]),
    )
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    database = BrokerDatabase(conninfo=options["url"])
    leads = LeaderSettings(lease_term_seconds=options.get("term", 3.0)) if options.get("leads") else None
    ConsumerRuntime(
        database,
        [(subscription, EffectHandler(invoker, options))],
        invoker=invoker,
        lease_seconds=options.get("lease_seconds", 1.5),
        session_task=LeadingConsumer(database, settings=leads) if leads else None,
    ).run(stop)


if __name__ == "__main__":
    main()
