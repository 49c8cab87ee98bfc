"""The rows of the inbox (table outbox_inbox), on the connection of the handlers, inside their transaction."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final
from uuid import UUID

from django.db import InternalError, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import IntegrityError
from psycopg import Error as DriverError

from outbox.broker.database.statement import Statement
from outbox.contrib.django.database.blocks import lost, sync_pipeline, watch_of
from outbox.contrib.django.fastpath.short_transaction import ShortTransaction
from outbox.errors import TransactionUsageError
from outbox.message import Delivery
from outbox.utils import fence

logger = logging.getLogger(__name__)

# One text for every connection to PostgreSQL, by way of Django or of a ShortTransaction. The statement itself sets the
# timeouts, for this transaction only (safe behind a pooler), before it can wait. A handler frozen together with its
# lease must not block the next owner of the queue.
_ENTER: Final = """
INSERT INTO outbox_inbox (consumer_group, generation, message_id)
SELECT %(group)s, %(generation)s::integer, {ids}
WHERE set_config('lock_timeout', %(lock)s, true) IS NOT NULL
  AND set_config('idle_in_transaction_session_timeout', %(idle)s, true) IS NOT NULL
ON CONFLICT DO NOTHING
RETURNING message_id
"""
# The variant for a single message is planned faster. The ids of a batch are sorted, so two batches cannot deadlock.
_ENTER_ONE_TEXT: Final = _ENTER.format(ids="%(message_ids)s::uuid")
_ENTER_ALL_TEXT: Final = _ENTER.format(ids="unnest(%(message_ids)s::uuid[])")
_ENTER_ONE: Final = Statement(_ENTER_ONE_TEXT)
_ENTER_ALL: Final = Statement(_ENTER_ALL_TEXT)
# Divides by zero if a row is gone.
_ALL_THERE: Final = Statement("""
SELECT 1 / (count(*) = %(count)s::integer)::integer FROM outbox_inbox
WHERE consumer_group = %(group)s AND generation = %(generation)s::integer AND message_id = ANY (%(message_ids)s::uuid[])
""")

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
        is_one = len(message_ids) == 1
        if ShortTransaction.is_possible(self._connection):
            # The watch does not see this BEGIN. Tell it: from here on, a transaction without this beginning is not the
            # block's.
            watch_of(self._connection).note_begun()
            self._short = ShortTransaction(self._connection)
            values = {
                **self._key_as_text(),
                "lock": lock.encode(),
                "idle": idle.encode(),
                "message_ids": str(message_ids[0]).encode() if is_one else _array(sorted(message_ids)),
            }
            rows = self._short.begin(_ENTER_ONE if is_one else _ENTER_ALL, values, prepare=is_one)
            return {UUID(value.decode()) for (value,) in rows if value is not None}
        group, generation = self._key
        parameters = {
            "group": group,
            "generation": generation,
            "lock": lock,
            "idle": idle,
            "message_ids": message_ids[0] if is_one else sorted(message_ids),
        }
        with self._connection.cursor() as cursor:
            cursor.execute(_ENTER_ONE_TEXT if is_one else _ENTER_ALL_TEXT, parameters)
            return {row[0] for row in cursor.fetchall()}

    def _key_as_text(self) -> dict[str, bytes]:
        group, generation = self._key
        return {"group": group.encode(), "generation": b"%d" % generation}

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
            if not self._commit(self._short, deliveries):
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

    def _commit(self, short: ShortTransaction, deliveries: Sequence[Delivery]) -> bool:
        if not deliveries:
            return short.commit(None, {})
        ids = _array([delivery.message_id for delivery in deliveries])
        return short.commit(_ALL_THERE, {**self._key_as_text(), "count": b"%d" % len(deliveries), "message_ids": ids})

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


def _array(values: Sequence[UUID]) -> bytes:
    return b"{%s}" % ",".join(map(str, values)).encode()


def handled(
    connection: BaseDatabaseWrapper, group: str, generations: Sequence[int], message_ids: Sequence[UUID]
) -> set[UUID]:
    """Those of the messages that the group's inbox has, in any of the generations."""
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
