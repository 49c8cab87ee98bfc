"""What a project leaves behind in a broker that it has used before: nobody works there any more."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

from django.db import connections

from outbox.broker.database.executor import Executor
from outbox.broker.operations.presence import is_used_by, unknown_transactions
from outbox.broker.operations.status import BrokerStatus, broker_status
from outbox.broker.schema.install import check_schema, installed_version
from outbox.contrib.django.database.aliases import broker_database, database_at
from outbox.contrib.django.ledger import ledger
from outbox.contrib.django.ledger.pruning import first_id_at
from outbox.contrib.django.settings.conf import OutboxSettings
from outbox.contrib.django.subscribers.registry import subscribers

_SAMPLE: Final = 100


def left_behind(alias: str, settings: OutboxSettings) -> list[str]:
    """What of this project's is undelivered in a broker on `alias`, which is not OUTBOX['BROKER']; [] without any.

    Raises BrokerUnavailable, or psycopg.Error where the tables cannot be read.
    """
    groups = sorted({item.subscription.group for item in subscribers()})
    with database_at(alias, settings).connect(name="outbox-check") as connection:
        if installed_version(connection, settings.schema) == 0:
            return []
        run = Executor(connection, settings.schema)
        if not is_used_by(run, producer_group=settings.producer_group, consumer_groups=groups):
            return []
        return list(undelivered(broker_status(run)))


def unknown_to_broker(alias: str, settings: OutboxSettings) -> int:
    """How many of the oldest ledger rows on `alias` are of transactions that the broker has never seen.

    Pruning removes a row only once the broker shows it decided, so rows for another broker stay, and are the oldest.
    Raises BrokerError, psycopg.Error, or django.db.Error.
    """
    below = first_id_at(datetime.now(UTC) - timedelta(minutes=1))
    ids = ledger.ids_between(connections[alias], UUID(int=0), below, limit=_SAMPLE)
    if not ids:
        return 0
    with broker_database(settings).connect(name="outbox-check") as connection:
        check_schema(connection, settings.schema)
        return len(unknown_transactions(Executor(connection, settings.schema), ids))


def undelivered(status: BrokerStatus) -> Iterator[str]:
    """The messages that are on their way, in words."""
    for topic in status.topics:
        totals = topic.totals
        open_ones = {"undecided": totals.undecided, "parked": totals.parked}
        waiting = {"not queued yet": totals.unsequenced, "held": totals.held, "scheduled": totals.scheduled}
        for state, number in {**open_ones, **waiting}.items():
            if number:
                yield f"topic {topic.name!r} has {number} messages {state}"
    for group in status.groups:
        for state, number in {"not handled": group.lag, "retrying": group.retrying, "dead": group.dead}.items():
            if number and not group.broadcast:
                yield f"group {group.name!r} has {number} messages {state}"
