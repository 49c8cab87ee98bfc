"""A process that forwards one topic of a broker to a sink until SIGTERM. One argument: JSON."""

from __future__ import annotations

import json
import logging
import sys
import threading

from django.utils.module_loading import import_string

from outbox.broker.consumer.runtime import ConsumerRuntime
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.supervisor import stop_on_signals
from outbox.contrib.forwarding.sinks.formats import format_named
from outbox.contrib.forwarding.sinks.forwarder import Forwarder, RawCodecs, subscription


def main() -> None:
    given = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.WARNING)
    sink = import_string(given["sink"])(**given["options"])
    form = format_named(given.get("format", "plain"), binding=sink.binding, source="/tests")
    topic = given["topic"]
    wanted = subscription("forward", topic, sink, suspend_seconds=0.2, **given.get("subscription", {}))
    stop = threading.Event()
    stop_on_signals(stop)
    ConsumerRuntime(
        BrokerDatabase(conninfo=given["url"]),
        [(wanted, Forwarder(sink, given.get("name", topic), form))],
        codecs=RawCodecs(),
        lease_seconds=2.0,
    ).run(stop)


if __name__ == "__main__":
    main()
