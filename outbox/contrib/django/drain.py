"""Everything that is due now, done once in this process: for scripts, tests and cron jobs."""

from __future__ import annotations

import uuid
from contextlib import closing
from dataclasses import dataclass

from outbox.broker.consumer.runtime import ConsumeCounts
from outbox.broker.sequencer.sequencer import Sequencer
from outbox.contrib.django.broker import flusher
from outbox.contrib.django.databases import broker_database
from outbox.contrib.django.periodic import run_check_back
from outbox.contrib.django.workers import consumer_runtime


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainCounts:
    """What was done: messages put into queues, and deliveries handled."""

    queued: int = 0
    handled: int = 0


def drain() -> DrainCounts:
    """Report ends, check back, sequence and consume, again until nothing is left to do now.

    Messages and retries that are due later are not waited for. Workers may run beside it. Raises what they raise.
    """
    flusher.flush()
    run_check_back()
    runtime, queued, handled = consumer_runtime(), 0, 0
    database = broker_database()
    sequencer = Sequencer(database, uuid.uuid4())
    with closing(database.connect(name="outbox-drain")) as connection:
        while True:
            appended = 0
            while (tick := sequencer.run_once(connection)).ticked or tick.more:
                appended += tick.appended
            counts = runtime.run_once()
            flusher.flush()
            queued, handled = queued + appended, handled + counts.handled
            if not appended and counts == ConsumeCounts():
                return DrainCounts(queued=queued, handled=handled)
