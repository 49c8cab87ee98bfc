"""A consumer process for tests: `python -m tests.broker.consumer.consumer_process '{"url": …, "name": …}'`.

Its handler writes a row of `effect` per message. A body's `do` says what becomes of the message, or what it does to its
process (LETHAL). `broken` runs the process without one of its protections, to show that the tests would notice.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outbox.broker.consumer.dispatcher import Dispatcher
from outbox.broker.consumer.owned_queue import OwnedQueue, Phase
from outbox.broker.consumer.runtime import ConsumerRuntime
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.leading import LeaderSettings, LeadingConsumer
from outbox.broker.supervisor import HUNG_EXIT_CODE, stop_on_signals, stop_with_parent
from outbox.errors import HandlersHung
from outbox.message import Delivery
from outbox.retry import RetryPolicy
from outbox.subscription import Mode, Subscription
from tests.broker.inbox import InboxInvoker

_EFFECT = "INSERT INTO effect (instance, queue, key, n, message_id, attempt) VALUES (%s, %s, %s, %s, %s, %s)"
LETHAL: dict[str, Callable[[], object]] = {
    "exit": lambda: os._exit(7),
    "exit_0": lambda: os._exit(0),
    "exit_hung": lambda: os._exit(HUNG_EXIT_CODE),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: ctypes.string_at(0),
    "hang": lambda: threading.Event().wait(),
}
# How many attempts at a message fail. Each error has a text of its own: many of one text in a row would be an outage.
FAILS = {"fails": 2, "poison": 1_000}


def without_fencing() -> None:
    """Assume that every lease is held for ever."""
    OwnedQueue.trusted = lambda self: True  # type: ignore[method-assign]
    OwnedQueue.may_start = lambda self: True  # type: ignore[method-assign]


def without_drain() -> None:
    """Release queues at once, while their handlers still run."""

    def hand_over(self: Dispatcher, queue: OwnedQueue) -> None:
        queue.phase = Phase.LOST
        self._owned.pop(queue.key, None)
        self._ownership.hand_back(queue.lease)

    Dispatcher._begin_hand_over = hand_over  # type: ignore[method-assign]
    OwnedQueue.may_start = lambda self: True  # type: ignore[method-assign]


BROKEN = {"": lambda: None, "no_fencing": without_fencing, "no_drain": without_drain}


class Handler:
    """Writes effects, after `fail` failed attempts; waits `seconds` per call, or while the file `gate` is missing.

    The file `calls` gets the number of each message before.
    """

    def __init__(self, invoker: InboxInvoker, options: Mapping[str, Any]) -> None:
        self._invoker = invoker
        self._options = options
        self._pause = threading.Event()

    def __call__(self, given: Delivery | Sequence[Delivery]) -> None:
        for delivery in [given] if isinstance(given, Delivery) else given:
            self._handle(delivery)
        self._pause.wait(self._options.get("seconds", 0.0))
        while (gate := self._options.get("gate")) and not Path(gate).exists():
            self._pause.wait(0.02)

    def _handle(self, d: Delivery) -> None:
        if calls := self._options.get("calls"):
            with Path(calls).open("a") as file:
                file.write(f"{d.body['n']}\n")
        deed = d.body.get("do", "")
        if deed in LETHAL or deed == "slow":
            # The calls that were started together with it are running by then.
            self._pause.wait(0.05)
        if deed in LETHAL:
            LETHAL[deed]()
        if d.attempt <= max(FAILS.get(deed, 0), self._options.get("fail", 0)):
            raise ValueError(f"{d.message_id} is told to fail")
        values = [self._options["name"], d.queue, d.key, d.body["n"], d.message_id, d.attempt]
        self._invoker.connection.execute(_EFFECT, values)


def subscription(options: Mapping[str, Any]) -> Subscription:
    given = {name: options[name] for name in ("batch", "filter", "timeout_seconds") if name in options}
    return Subscription(
        group=options.get("group", "g"),
        topic=options.get("topic", "orders"),
        mode=Mode(options.get("mode", "concurrent")),
        threads=options.get("threads", 4),
        suspend_seconds=options.get("suspend_seconds", 0.1),
        retry=RetryPolicy(
            delays_seconds=options.get("delays_seconds", [0.1]), max_attempts=options.get("max_attempts", 16)
        ),
        **given,
    )


def main() -> int:
    options = json.loads(sys.argv[1])
    logging.basicConfig(level=options.get("log", "ERROR"), format=f"{options['name']} %(message)s")
    # A test that fails can then show where it hangs.
    faulthandler.register(signal.SIGUSR1)
    BROKEN[options.get("broken", "")]()
    invoker = InboxInvoker(
        options["url"], once=options.get("inbox", True), idle_seconds=options.get("idle_seconds", 1.0)
    )
    stop = threading.Event()
    stop_on_signals(stop)
    stop_with_parent(stop)
    database = BrokerDatabase(conninfo=options["url"])
    leads = LeaderSettings(lease_term_seconds=options.get("term", 3.0)) if options.get("leads") else None
    handler = Handler(invoker, options)
    try:
        ConsumerRuntime(
            database,
            [(subscription({**options, **one}), handler) for one in options.get("subscriptions", [{}])],
            invoker=invoker,
            lease_seconds=options.get("lease_seconds", 1.5),
            session_task=LeadingConsumer(database, settings=leads) if leads else None,
        ).run(stop)
    except HandlersHung:
        logging.shutdown()
        return HUNG_EXIT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main())
