"""A consumer process whose messages say what becomes of them: `python -m tests.broker.consumer.fate_process '{…}'`.

A body's `fate`: fails (its first two attempts), poison (every attempt), slow, exit or hang (its process); any other
takes effect. Each error has a text of its own: many of one text in a row would be an outage, not these messages' fault.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence

from outbox.broker.consumer.runtime import ConsumerRuntime
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.supervisor import HUNG_EXIT_CODE, stop_on_signals, stop_with_parent
from outbox.errors import HandlersHung
from outbox.message import Delivery
from outbox.ports import AnyHandler
from outbox.retry import RetryPolicy
from outbox.subscription import Mode, Subscription
from tests.broker.inbox import InboxInvoker

_EFFECT = "INSERT INTO effect (instance, queue, key, n, message_id, attempt) VALUES (%s, %s, %s, %s, %s, %s)"
_LETHAL: dict[str, Callable[[], object]] = {"exit": lambda: os._exit(7), "hang": lambda: threading.Event().wait()}


class Handler:
    """Lets messages meet their fate."""

    def __init__(self, invoker: InboxInvoker, name: str) -> None:
        self._invoker = invoker
        self._name = name
        self._pause = threading.Event()

    def __call__(self, given: Delivery | Sequence[Delivery]) -> None:
        for delivery in [given] if isinstance(given, Delivery) else given:
            self._handle(delivery)

    def _handle(self, d: Delivery) -> None:
        fate = d.body["fate"]
        if fate in _LETHAL:
            _LETHAL[fate]()
        if fate == "poison" or (fate == "fails" and d.attempt <= 2):
            raise ValueError(f"{d.message_id} is told to fail")
        self._pause.wait(0.05 if fate == "slow" else 0.0)
        values = [self._name, d.queue, d.key, d.body["n"], d.message_id, d.attempt]
        self._invoker.connection.execute(_EFFECT, values)


def main() -> None:
    options = json.loads(sys.argv[1])
    logging.basicConfig(level=options.get("log", "CRITICAL"), format=f"{options['name']} %(message)s")
    stop = threading.Event()
    stop_on_signals(stop)
    stop_with_parent(stop)
    invoker = InboxInvoker(options["url"])
    handler: AnyHandler = Handler(invoker, options["name"])
    retry = RetryPolicy(delays_seconds=[0.05, 0.1], max_attempts=4)
    concurrent = Subscription(
        group="workers", topic="orders", timeout_seconds=3.0, batch=options.get("batch", 1), retry=retry
    )
    ordered = Subscription(group="ordered", topic="steps", mode=Mode.KEY_ORDERED, suspend_seconds=0.05)
    try:
        ConsumerRuntime(
            BrokerDatabase(conninfo=options["url"]),
            [(concurrent, handler), (ordered, handler)],
            invoker=invoker,
            lease_seconds=1.5,
        ).run(stop)
    except HandlersHung:
        logging.shutdown()
        sys.exit(HUNG_EXIT_CODE)


if __name__ == "__main__":
    main()
