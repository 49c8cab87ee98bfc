"""A consumer process with a group on each of many topics, which notes how many messages each call had and when."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Sequence

from benchmarks.peers.record import handled
from outbox.broker.consumer.runtime import ConsumerRuntime, tune_garbage_collector
from outbox.broker.database.connection import BrokerDatabase
from outbox.message import Delivery
from outbox.retry import RetryPolicy
from outbox.subscription import Subscription


def handle(batch: Sequence[Delivery]) -> None:
    """Count."""
    handled(len(batch))


def handle_after_a_failure(delivery: Delivery) -> None:
    """Fail at the first attempt of one in five.

    Each with an error of its own: of those that are alike a consumer, with nothing else left to try, thinks that what
    they need is away, and waits without using up an attempt.
    """
    if delivery.attempt == 1 and delivery.message_id.int % 5 == 0:
        raise ValueError(f"try {delivery.message_id} again")
    handled(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--database", required=True)
    parser.add_argument("--topics", required=True, type=int)
    parser.add_argument(
        "--fail-first", type=float, metavar="SECONDS", help="one message in five is retried after so long"
    )
    options = parser.parse_args()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    names = [(f"group-{number}", f"topic-{number}") for number in range(1, options.topics + 1)]
    if options.fail_first is None:
        work = [(Subscription(group=group, topic=topic, batch=500), handle) for group, topic in names]
        runtime = ConsumerRuntime(BrokerDatabase(conninfo=options.database), work)
    else:
        retry = RetryPolicy(delays_seconds=[options.fail_first])
        failing = [
            (Subscription(group=group, topic=topic, retry=retry), handle_after_a_failure) for group, topic in names
        ]
        runtime = ConsumerRuntime(BrokerDatabase(conninfo=options.database), failing)
    # As the consumer processes of a worker do.
    tune_garbage_collector()
    runtime.run(stop)


if __name__ == "__main__":
    main()
