"""The inbox: a handler's effects and the note that they happened commit together, so they happen once.

The inbox row is written first. A second delivery of the same message, also by another process at the same
moment, waits for the first one's transaction at the unique key and then finds the row: the handler is skipped.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final
from uuid import UUID

from django.db import connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import IntegrityError, OperationalError

from outbox import fence
from outbox.contrib.django.registry import Subscriber, find_subscriber
from outbox.errors import ConfigurationError, PartialFailure, TransactionUsageError
from outbox.faults import point
from outbox.message import Delivery
from outbox.ports import AnyHandler, Disposition, call_handler
from outbox.subscription import Subscription

logger = logging.getLogger(__name__)

Result = Disposition | Exception

# The timeouts hold for this transaction only (right behind a pooler too) and are set by the statement itself,
# before it can wait: a handler frozen together with its lease must not block the next owner of the queue.
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

_DELETE: Final = """
DELETE FROM outbox_inbox WHERE consumer_group = %s AND generation = %s AND message_id = %s
"""


def enter(
    connection: BaseDatabaseWrapper,
    group: str,
    generation: int,
    message_ids: Sequence[UUID],
    *,
    lease_seconds: float,
) -> set[UUID]:
    """Write the inbox rows of messages inside the open transaction; returns those that were not there yet."""
    if connection.vendor == "postgresql":
        limits = [str(round(lease_seconds * share * 1000)) for share in (0.5, 0.8)]
        with connection.cursor() as cursor:
            parameters: list[Any] = [group, generation, *limits, list(message_ids)]
            cursor.execute(_INSERT_POSTGRESQL, parameters)
            return {row[0] for row in cursor.fetchall()}
    return {value for value in sorted(message_ids) if _enter_one(connection, group, generation, value)}


def _enter_one(connection: BaseDatabaseWrapper, group: str, generation: int, message_id: UUID) -> bool:
    stored = message_id if connection.features.has_native_uuid_field else message_id.hex
    parameters: list[Any] = [group, generation, stored]
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute(_INSERT_SQLITE, parameters)
            return bool(cursor.rowcount == 1)
        try:
            with transaction.atomic(using=connection.alias):
                cursor.execute(_INSERT, parameters)
        except IntegrityError:
            return False
        return True


def leave(connection: BaseDatabaseWrapper, group: str, generation: int, message_ids: Sequence[UUID]) -> None:
    """Remove the rows of messages whose effects the handler took back."""
    native = connection.features.has_native_uuid_field
    with connection.cursor() as cursor:
        cursor.executemany(
            _DELETE, [[group, generation, value if native else value.hex] for value in sorted(message_ids)]
        )


class InboxInvoker:
    """Implements ports.Invoker for Django handlers: transaction, inbox, timeouts, care for broken connections."""

    def __init__(self, *, lease_seconds: float = 10.0) -> None:
        self._lease_seconds = lease_seconds

    def __call__(
        self, subscription: Subscription, handler: AnyHandler, deliveries: Sequence[Delivery], *, generation: int
    ) -> Sequence[Result]:
        """See ports.Invoker."""
        registered = find_subscriber(subscription)
        refresh_connections()
        try:
            if registered is None or not registered.idempotent:
                return call_handler(subscription, handler, deliveries, generation=generation)
            return self._once(registered, subscription, handler, deliveries, generation)
        except Exception as error:
            return [error] * len(deliveries)
        finally:
            refresh_connections()

    def _once(
        self,
        registered: Subscriber,
        subscription: Subscription,
        handler: AnyHandler,
        deliveries: Sequence[Delivery],
        generation: int,
    ) -> Sequence[Result]:
        alias = registered.using or _default_alias()
        connection = connections[alias]
        group = subscription.group
        with transaction.atomic(using=alias):
            ids = [delivery.message_id for delivery in deliveries]
            new = enter(connection, group, generation, ids, lease_seconds=self._lease_seconds)
            # One message may come twice: redelivered, and back from the retry queue. The first of them is handled.
            firsts: dict[UUID, Delivery] = {}
            for delivery in deliveries:
                firsts.setdefault(delivery.message_id, delivery)
            fresh = [delivery for message_id, delivery in firsts.items() if message_id in new]
            failed = _handle(subscription, handler, fresh)
            if failed:
                leave(connection, group, generation, list(failed))
            if connection.needs_rollback:
                raise TransactionUsageError(
                    f"{registered.name} marked its transaction for rollback without raising: the message counts as "
                    f"failed. Raise the error that made it do so."
                )
            point("consumer.before_inbox_commit")
            fence.check()
        point("consumer.after_inbox_commit")
        called = set(map(id, fresh))
        return [_result(delivery, id(delivery) in called, failed) for delivery in deliveries]


def _handle(subscription: Subscription, handler: AnyHandler, deliveries: Sequence[Delivery]) -> dict[UUID, Exception]:
    """Run the handler; what a batch reports as failed. Any other exception passes through and rolls back."""
    if not deliveries:
        return {}
    try:
        handler(deliveries if subscription.batch > 1 else deliveries[0])  # type: ignore[arg-type]
    except PartialFailure as partial:
        return {
            delivery.message_id: partial.errors[delivery.message_id]
            for delivery in deliveries
            if delivery.message_id in partial.errors
        }
    return {}


def _result(delivery: Delivery, called: bool, failed: dict[UUID, Exception]) -> Result:
    if delivery.message_id in failed:
        return failed[delivery.message_id]
    return Disposition.HANDLED if called else Disposition.SKIPPED


def require_inboxes(subscriptions: Iterable[Subscription]) -> None:
    """Raise ConfigurationError where handlers need an inbox that no migration made: each message would fail.

    A database that is away is no reason to end: its messages are tried again later.
    """
    from outbox.contrib.django.models import InboxEntry

    table = InboxEntry._meta.db_table
    registered = filter(None, map(find_subscriber, subscriptions))
    for alias in sorted({item.using or _default_alias() for item in registered if item.idempotent}):
        try:
            found = connections[alias].introspection.table_names()
        except OperationalError as error:
            logger.warning("whether %r has an inbox cannot be looked up now: %s", alias, error)
            continue
        if table not in found:
            raise ConfigurationError(
                f"the table {table!r} is missing on {alias!r}, so that handlers with the inbox cannot run: run "
                f"`manage.py migrate --database={alias}`. Nothing was consumed."
            )


def _default_alias() -> str:
    from outbox.contrib.django.models import InboxEntry

    return router.db_for_write(InboxEntry)


class _Closing:
    """Closes connections when it goes."""

    def __init__(self) -> None:
        self.connections: Sequence[BaseDatabaseWrapper] = ()

    def __del__(self) -> None:
        for connection in self.connections:
            with contextlib.suppress(Exception):
                connection.close()


class _OfThread(threading.local):
    """The connections of one handler thread, closed when the thread ends and its locals with it.

    The threads are the runtime's, which knows nothing of Django; left alone, the connections would stay open until
    they are collected.
    """

    def __init__(self) -> None:
        self.closing = _Closing()


_of_thread = _OfThread()


def refresh_connections() -> None:
    """Drop this thread's connections that are broken or past their CONN_MAX_AGE.

    Unlike Django's close_old_connections it keeps those of CONN_MAX_AGE = 0, which means "for one request": a
    worker that reconnected for every message would do little else.
    """
    opened = _of_thread.closing.connections = connections.all(initialized_only=True)
    for connection in opened:
        if connection.connection is None or connection.in_atomic_block:
            continue
        expired = (
            bool(connection.settings_dict["CONN_MAX_AGE"])
            and connection.close_at is not None
            and time.monotonic() >= connection.close_at
        )
        broken = connection.errors_occurred and not connection.is_usable()
        if expired or broken:
            connection.close()
        connection.errors_occurred = False
