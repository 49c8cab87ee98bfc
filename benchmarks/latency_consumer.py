"""A consumer process that notes when each handler call begins, for the latency benchmark."""

from __future__ import annotations

import argparse
import json
import signal
import threading
import time
from pathlib import Path

from outbox.broker.consumer.runtime import ConsumerRuntime, tune_garbage_collector
from outbox.broker.database.connection import BrokerDatabase
from outbox.message import Delivery
from outbox.subscription import Subscription


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--database", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--into", required=True, type=Path)
    options = parser.parse_args()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    begun: dict[str, int] = {}

    def handle(delivery: Delivery) -> None:
        begun[str(delivery.message_id)] = time.time_ns()

    subscription = Subscription(group="bench", topic=options.topic)
    runtime = ConsumerRuntime(BrokerDatabase(conninfo=options.database), [(subscription, handle)])
    # As the consumer processes of a worker do.
    tune_garbage_collector()
    print("ready", flush=True)
    runtime.run(stop)
    options.into.write_text(json.dumps(begun))


if __name__ == "__main__":
    main()
