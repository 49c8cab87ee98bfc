"""A consumer process whose messages say what they do to it: `python -m tests.broker.consumer.killer_process '{…}'`.

A body's `do` is a key of DEEDS; without one its handler writes a row of `effect`, after `seconds`. Only while the file
`armed` exists, if one is named.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outbox.broker.consumer.runtime import ConsumerRuntime
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.supervisor import HUNG_EXIT_CODE, stop_on_signals, stop_with_parent
from outbox.errors import HandlersHung
from outbox.message import Delivery
from outbox.retry import RetryPolicy
from outbox.subscription import Mode, Subscription
from tests.broker.inbox import InboxInvoker

_EFFECT = "INSERT INTO effect (instance, queue, key, n, message_id, attempt) VALUES (%s, %s, %s, %s, %s, %s)"
DEEDS: dict[str, Callable[[], object]] = {
    "exit": lambda: os._exit(7),
    "exit_0": lambda: os._exit(0),
    "exit_hung": lambda: os._exit(HUNG_EXIT_CODE),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: ctypes.string_at(0),
    "system_exit": lambda: sys.exit(9),
    "hang": lambda: threading.Event().wait(),
}


class Handler:
    """Does what the messages say."""

    def __init__(self, invoker: InboxInvoker, options: dict[str, Any]) -> None:
        self._invoker = invoker
        self._options = options
        self._pause = threading.Event()

    def __call__(self, given: Delivery | Sequence[Delivery]) -> None:
        for delivery in [given] if isinstance(given, Delivery) else given:
            self._handle(delivery)

    def _handle(self, d: Delivery) -> None:
        with Path(self._options["calls"]).open("a") as calls:
            calls.write(f"{d.body['n']}\n")
        armed = self._options.get("armed")
        if d.body.get("do") and (armed is None or Path(armed).exists()):
            # The calls that were started together with it are running by now.
            self._pause.wait(self._options.get("before", 0.05))
            DEEDS[d.body["do"]]()
        self._pause.wait(self._options.get("seconds", 0.0))
        values = [self._options["name"], d.queue, d.key, d.body["n"], d.message_id, d.attempt]
        self._invoker.connection.execute(_EFFECT, values)


def main() -> int:
    options = json.loads(sys.argv[1])
    logging.basicConfig(level=options.get("log", "ERROR"), format=f"{options['name']} %(message)s")
    # A test that fails can then show where it hangs.
    faulthandler.register(signal.SIGUSR1)
    stop = threading.Event()
    stop_on_signals(stop)
    stop_with_parent(stop)
    invoker = InboxInvoker(options["url"])
    subscriptions = [
        Subscription(
            group=group,
            topic="orders",
            mode=Mode(options.get("mode", "concurrent")),
            batch=options.get("batch", 1),
            threads=options.get("threads", 4),
            suspend_seconds=0.1,
            timeout_seconds=options.get("timeout_seconds", 60.0),
            retry=RetryPolicy(delays_seconds=[0.1], max_attempts=options.get("max_attempts", 16)),
        )
        for group in options.get("groups", ["g"])
    ]
    try:
        ConsumerRuntime(
            BrokerDatabase(conninfo=options["url"]),
            [(subscription, Handler(invoker, options)) for subscription in subscriptions],
            invoker=invoker,
            lease_seconds=options.get("lease_seconds", 1.5),
        ).run(stop)
    except HandlersHung:
        logging.shutdown()
        return HUNG_EXIT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main())
