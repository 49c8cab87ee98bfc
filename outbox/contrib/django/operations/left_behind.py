"""What a project has left in a broker that it used before, and where none of its workers runs any more."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

from django.db import connections

from outbox.broker.database.executor import Executor
from outbox.broker.operations.presence import is_used_by, unknown_transactions
from outbox.broker.operations.status import broker_status
from outbox.broker.schema.install import check_schema, installed_version
from outbox.contrib.django.database.aliases import broker_database, database_at
from outbox.contrib.django.engine.postgres import undelivered
from outbox.contrib.django.ledger import ledger
from outbox.contrib.django.ledger.pruning import first_id_at
from outbox.contrib.django.settings.conf import OutboxSettings
from outbox.contrib.django.subscribers.registry import subscribers

_SAMPLE: Final = 100


def left_behind(alias: str, settings: OutboxSettings) -> list[str]:
    """The project's undelivered messages in a broker on `alias` other than OUTBOX['BROKER']; empty if there are none.

    Raises BrokerUnavailable, or psycopg.Error if the tables cannot be read.
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

    Pruning removes a row only when the broker shows it as decided. So rows for another broker stay, and are the oldest.
    Raises BrokerError, psycopg.Error, or django.db.Error.
    """
    below = first_id_at(datetime.now(UTC) - timedelta(minutes=1))
    ids = ledger.ids_between(connections[alias], UUID(int=0), below, limit=_SAMPLE)
    if not ids:
        return 0
    with broker_database(settings).connect(name="outbox-check") as connection:
        check_schema(connection, settings.schema)
        return len(unknown_transactions(Executor(connection, settings.schema), ids))
