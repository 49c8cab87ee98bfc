"""A consumer process with a no-op batch handler, for the bulk benchmark."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Sequence

from benchmarks.claiming import BATCH
from outbox.broker.consumer.runtime import ConsumerRuntime, tune_garbage_collector
from outbox.broker.database.connection import BrokerDatabase
from outbox.message import Delivery
from outbox.subscription import Subscription


def handle(batch: Sequence[Delivery]) -> None:
    """Do nothing, as the peers' handlers do."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--database", required=True)
    parser.add_argument("--topic", required=True)
    options = parser.parse_args()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    subscription = Subscription(group="bench", topic=options.topic, batch=BATCH)
    runtime = ConsumerRuntime(BrokerDatabase(conninfo=options.database), [(subscription, handle)])
    # As the consumer processes of a worker do.
    tune_garbage_collector()
    print("ready", flush=True)
    runtime.run(stop)


if __name__ == "__main__":
    main()
