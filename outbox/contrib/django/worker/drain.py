"""Does all work that is due now once in this process: for scripts, tests and cron jobs."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from outbox.broker.consumer.runtime import ConsumeCounts
from outbox.broker.schema.refusals import naming
from outbox.broker.sequencer.sequencer import Sequencer
from outbox.contrib.django.database.aliases import broker_database
from outbox.contrib.django.engine.broker import flusher
from outbox.contrib.django.publishing.checkback import run_check_back
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.errors import ConfigurationError
from outbox.ports import AnyHandler


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainCounts:
    """The counts: messages put into queues, and deliveries handled or failed."""

    queued: int = 0
    handled: int = 0
    failed: int = 0


def settle() -> int:
    """Report ends, check back and sequence; returns the number of messages put into queues. Raises their errors."""
    flusher.flush()
    run_check_back()
    database = broker_database()
    sequencer, queued = Sequencer(database, uuid.uuid4()), 0
    with closing(database.connect(name="outbox-drain")) as connection, naming("sequencing", database.schema):
        while (tick := sequencer.run_once(connection)).ticked or tick.more:
            queued += tick.appended
    return queued


def drain(*, groups: Sequence[str] = (), wrap: Callable[[AnyHandler], AnyHandler] | None = None) -> DrainCounts:
    """Settle and consume repeatedly until no work is due.

    `groups`: only these; `wrap`: gets every handler, and returns the function to call instead. It does not wait for
    messages and retries that are due later. Workers may run at the same time. Raises the errors of its parts.
    """
    if get_settings().is_rocketmq:
        raise ConfigurationError(
            "RocketMQ does not report what is due now: run outbox_worker, or outbox_worker --until-drained, which "
            "ends when nothing is left."
        )
    runtime, queued, handled, failed = consumer_runtime(groups=groups, wrap=wrap), 0, 0, 0
    while True:
        appended = settle()
        counts = runtime.run_once()
        queued, handled, failed = queued + appended, handled + counts.handled, failed + counts.failed
        if not appended and counts == ConsumeCounts():
            return DrainCounts(queued=queued, handled=handled, failed=failed)
