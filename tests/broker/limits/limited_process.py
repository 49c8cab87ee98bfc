"""A consumer process with limits: `python -m tests.broker.limits.limited_process '{"url": …, "limits": …}'`.

Its handler writes the begin and the end of each call into the table `span`, in transactions of their own.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
from typing import Any

import psycopg

from outbox.broker.consumer.runtime import ConsumerRuntime
from outbox.broker.database.connection import BrokerDatabase
from outbox.contrib.limits import Limits
from outbox.message import Delivery
from outbox.retry import RetryPolicy
from outbox.subscription import Subscription

TABLE = """
CREATE TABLE IF NOT EXISTS span (
    position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text NOT NULL, key text NOT NULL, n integer NOT NULL,
    attempt integer NOT NULL, began timestamptz NOT NULL DEFAULT clock_timestamp(), ended timestamptz
)
"""
_BEGIN = "INSERT INTO span (name, key, n, attempt) VALUES (%s, %s, %s, %s) RETURNING position"


class SpanHandler:
    """Waits `seconds` per call, and fails the first `fail` attempts."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._own = threading.local()
        self._pause = threading.Event()

    def __call__(self, delivery: Delivery) -> None:
        if not hasattr(self._own, "connection"):
            self._own.connection = psycopg.connect(self._options["url"], autocommit=True)
        run = self._own.connection.execute
        values = [self._options["name"], delivery.key, delivery.body["n"], delivery.attempt]
        [position] = run(_BEGIN, values).fetchone()
        self._pause.wait(self._options.get("seconds", 0.0))
        run("UPDATE span SET ended = clock_timestamp() WHERE position = %s", [position])
        if delivery.attempt <= self._options.get("fail", 0):
            raise ValueError(f"attempt {delivery.attempt} of {delivery.message_id}")


def main() -> None:
    options = json.loads(sys.argv[1])
    logging.basicConfig(level="ERROR", format=f"{options['name']} %(message)s")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    subscription = Subscription(
        group="g",
        topic="orders",
        threads=options.get("threads", 8),
        retry=RetryPolicy(delays_seconds=[0.05]),
        options=[Limits(**options["limits"])] if options["limits"] is not None else [],
    )
    database = BrokerDatabase(conninfo=options["url"])
    ConsumerRuntime(
        database, [(subscription, SpanHandler(options))], lease_seconds=options.get("lease_seconds", 1.5)
    ).run(stop)


if __name__ == "__main__":
    main()
