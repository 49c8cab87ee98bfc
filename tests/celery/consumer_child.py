"""A consumer process: writes the id of every message it handles into the table `handled`, once by its inbox."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time

import psycopg

from outbox.broker.consumer.runtime import ConsumerRuntime
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.supervisor import stop_with_parent
from outbox.message import Delivery
from outbox.retry import RetryPolicy
from outbox.subscription import Subscription
from tests.broker.inbox import InboxInvoker

URL = os.environ["OUTBOX_BROKER_URL"]
LEASE_SECONDS = float(os.environ.get("OUTBOX_TEST_LEASE_SECONDS", "2"))


def main() -> None:
    # A test that fails can then show where it hangs.
    faulthandler.register(signal.SIGUSR1)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    stop_with_parent(stop)
    invoker = InboxInvoker(URL)

    def handle(delivery: Delivery) -> None:
        with psycopg.connect(URL, autocommit=True) as connection:
            connection.execute("INSERT INTO started VALUES (%s)", [delivery.message_id])
        # The work of a slow handler, so that a stop can arrive in the middle of it.
        time.sleep(float(delivery.headers.get("seconds", "0")))
        invoker.connection.execute("INSERT INTO handled VALUES (%s, %s)", [delivery.message_id, os.getpid()])

    # A handler that was cut off on a busy machine (its transaction may not idle long) comes again soon.
    retry = RetryPolicy(delays_seconds=[0.2], max_attempts=None)
    subscription = Subscription(group="celery-tests", topic="orders", retry=retry, threads=2, timeout_seconds=900)
    ConsumerRuntime(
        BrokerDatabase(conninfo=URL), [(subscription, handle)], invoker=invoker, lease_seconds=LEASE_SECONDS
    ).run(stop)


if __name__ == "__main__":
    main()
