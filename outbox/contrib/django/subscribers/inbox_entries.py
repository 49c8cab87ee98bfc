"""The rows of the inbox (table outbox_inbox), on the connection of the handlers, inside their transaction.

See decision 114.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final
from uuid import UUID

from django.db import InternalError, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import IntegrityError
from psycopg import Error as DriverError

from outbox.contrib.django.database.blocks import lost, sync_pipeline
from outbox.contrib.django.subscribers.short_transaction import ShortTransaction
from outbox.errors import TransactionUsageError
from outbox.message import Delivery
from outbox.utils import fence

logger = logging.getLogger(__name__)

# The statement itself sets the timeouts, for this transaction only (safe behind a pooler), before it can wait. A
# handler frozen together with its lease must not block the next owner of the queue.
_INSERT_POSTGRESQL: Final = """
INSERT INTO outbox_inbox (consumer_group, generation, message_id)
SELECT %s, %s, message_id
FROM (SELECT set_config('lock_timeout', %s, true) AS lock_timeout,
             set_config('idle_in_transaction_session_timeout', %s, true) AS idle_timeout) AS setting,
     unnest(%s::uuid[]) AS message_id
WHERE lock_timeout IS NOT NULL AND idle_timeout IS NOT NULL
ORDER BY message_id
ON CONFLICT DO NOTHING
RETURNING message_id
"""

_INSERT: Final = "INSERT INTO outbox_inbox (consumer_group, generation, message_id) VALUES (%s, %s, %s)"
_INSERT_SQLITE: Final = f"{_INSERT} ON CONFLICT DO NOTHING"

_SELECT: Final = "SELECT message_id FROM outbox_inbox WHERE consumer_group = %s AND generation = %s AND message_id"

# Below the parameter limit of every database that Django supports.
_LARGEST_LIST: Final = 500

_DELETE: Final = """
DELETE FROM outbox_inbox WHERE consumer_group = %s AND generation = %s AND message_id = %s
"""


class InboxEntries:
    """The inbox rows of one consumer group and generation, on the connection of its handlers."""

    def __init__(self, connection: BaseDatabaseWrapper, group: str, generation: int) -> None:
        self._connection = connection
        self._key: list[Any] = [group, generation]
        self._short: ShortTransaction | None = None
        # Whether only COMMIT was left to do; a failure then happened in it or after it.
        self.is_confirmed = False

    def enter(self, deliveries: Sequence[Delivery], *, lease_seconds: float) -> list[Delivery]:
        """Write the rows inside the open transaction; returns the deliveries whose row was new.

        A batch may contain one message twice: redelivered, and back from the retry queue. The first of them is handled.
        """
        firsts: dict[UUID, Delivery] = {}
        for delivery in deliveries:
            firsts.setdefault(delivery.message_id, delivery)
        if self._connection.vendor == "postgresql":
            new = self._enter_all(list(firsts), lease_seconds)
        else:
            new = {value for value in sorted(firsts) if self._enter_one(value)}
        return [delivery for message_id, delivery in firsts.items() if message_id in new]

    def _enter_all(self, message_ids: Sequence[UUID], lease_seconds: float) -> set[UUID]:
        lock, idle = (str(round(lease_seconds * share * 1000)) for share in (0.5, 0.8))
        if ShortTransaction.is_possible(self._connection):
            group, generation = self._key
            self._short = ShortTransaction(self._connection, group, generation)
            return self._short.begin(message_ids, (lock, idle))
        with self._connection.cursor() as cursor:
            parameters: list[Any] = [*self._key, lock, idle, list(message_ids)]
            cursor.execute(_INSERT_POSTGRESQL, parameters)
            return {row[0] for row in cursor.fetchall()}

    def _enter_one(self, message_id: UUID) -> bool:
        parameters = [*self._key, self._stored(message_id)]
        with self._connection.cursor() as cursor:
            if self._connection.vendor == "sqlite":
                cursor.execute(_INSERT_SQLITE, parameters)
                return bool(cursor.rowcount == 1)
            try:
                with transaction.atomic(using=self._connection.alias):
                    cursor.execute(_INSERT, parameters)
            except IntegrityError:
                return False
            return True

    def leave(self, message_ids: Iterable[UUID]) -> None:
        """Remove the rows of messages whose effects the handler undid."""
        rows = [[*self._key, self._stored(value)] for value in sorted(message_ids)]
        if rows:
            with self._connection.cursor() as cursor:
                cursor.executemany(_DELETE, rows)

    def confirm(self, deliveries: Sequence[Delivery], name: str) -> None:
        """The last statement of the transaction: verify that the rows, and so the effects, are still part of it.

        It commits at once if that saves a round trip. Raises TransactionUsageError if the rows are not part of it:
        COMMIT would succeed and store nothing.
        """
        if self._connection.needs_rollback:
            raise TransactionUsageError(
                f"{name} marked its transaction for rollback without raising (or closed its connection): the message "
                "counts as failed. Raise the error that caused the rollback."
            )
        gone = "its inbox row is gone (a ROLLBACK was executed inside it)"
        if self._short is not None and self._short.is_whole():
            self.is_confirmed = True
            if not self._short.commit([delivery.message_id for delivery in deliveries]):
                self.is_confirmed = False
                raise lost(self._connection, name, gone)
            return
        try:
            sync_pipeline(self._connection)
            found = self._present(deliveries)
        except (InternalError, DriverError) as error:
            raise lost(self._connection, name, str(error).strip()) from error
        if len(found) < len(deliveries):
            raise lost(self._connection, name, gone)
        self.is_confirmed = True

    def still_there(self, deliveries: Sequence[Delivery]) -> set[UUID]:
        """After a failed attempt: messages whose row was committed nevertheless, by a COMMIT of the handler's own."""
        if not deliveries or fence.is_lost():
            # No rows to read; or another owner may have written the row by now.
            return set()
        try:
            return self._present(deliveries)
        except Exception as error:
            logger.info("the inbox on %r cannot be read after a failure: %s", self._connection.alias, error)
            return set()

    def _present(self, deliveries: Sequence[Delivery]) -> set[UUID]:
        if not deliveries:
            return set()
        stored = [self._stored(delivery.message_id) for delivery in deliveries]
        if self._connection.vendor == "postgresql":
            statement, parameters = f"{_SELECT} = ANY (%s)", [*self._key, stored]
        else:
            statement, parameters = f"{_SELECT} IN ({', '.join(['%s'] * len(stored))})", [*self._key, *stored]
        with self._connection.cursor() as cursor:
            cursor.execute(statement, parameters)
            return {value if isinstance(value, UUID) else UUID(value) for (value,) in cursor.fetchall()}

    def _stored(self, message_id: UUID) -> Any:
        return message_id if self._connection.features.has_native_uuid_field else message_id.hex


def handled(
    connection: BaseDatabaseWrapper, group: str, generations: Sequence[int], message_ids: Sequence[UUID]
) -> set[UUID]:
    """The messages among these that the group's inbox has, in any generation."""
    found: set[UUID] = set()
    native = connection.features.has_native_uuid_field
    for start in range(0, len(message_ids), _LARGEST_LIST):
        part = [value if native else value.hex for value in message_ids[start : start + _LARGEST_LIST]]
        places = ", ".join(["%s"] * len(part))
        for generation in generations:
            with connection.cursor() as cursor:
                cursor.execute(f"{_SELECT} IN ({places})", [group, generation, *part])
                found.update(value if isinstance(value, UUID) else UUID(value) for (value,) in cursor.fetchall())
    return found
