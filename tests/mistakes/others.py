"""The world around a program: what other sessions do, and in what state a connection is."""

from __future__ import annotations

import contextlib
from typing import Final

import psycopg
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg.pq import PipelineStatus, TransactionStatus

from outbox.contrib.django.database.aliases import alias_conninfo
from tests.django.shop.models import Order, Payment

DUPLICATE: Final = "there already"
LOCKED: Final = "locked elsewhere"
HELD_KEY: Final = "held elsewhere"


class Others:
    """Other sessions on a PostgreSQL alias: they hold a lock and a unique key, and end a session. SQLite has none."""

    def __init__(self, alias: str) -> None:
        self._stack = contextlib.ExitStack()
        self.alias = alias
        Order.objects.using(alias).get_or_create(number=DUPLICATE)
        Order.objects.using(alias).get_or_create(number=LOCKED)
        Payment.objects.using(alias).get_or_create(reference=DUPLICATE)
        if connections[alias].vendor == "postgresql":
            self._locker, self._killer = (
                self._stack.enter_context(psycopg.connect(alias_conninfo(alias), autocommit=own))
                for own in (False, True)
            )
            self._locker.execute("SELECT 1 FROM shop_order WHERE number = %s FOR UPDATE", [LOCKED])
            self._locker.execute(
                "INSERT INTO outbox_unique (topic, unique_key, message_id, until)"
                " VALUES ('orders', %s, gen_random_uuid(), now() + interval '1 hour')",
                [HELD_KEY],
            )

    def kill(self, connection: BaseDatabaseWrapper) -> None:
        """End the connection's session on the server; returns when it is gone."""
        connection.ensure_connection()
        self._killer.execute("SELECT pg_terminate_backend(%s, 10000)", [connection.connection.info.backend_pid])

    def close(self) -> None:
        """Leave the databases as they were."""
        if connections[self.alias].vendor == "postgresql":
            self._locker.rollback()
        self._stack.close()
        Order.objects.using(self.alias).filter(number__in=[DUPLICATE, LOCKED]).delete()
        Payment.objects.using(self.alias).filter(reference=DUPLICATE).delete()


def is_alive(connection: BaseDatabaseWrapper) -> bool | None:
    """Whether the next statement runs in a transaction that can still commit; None when that cannot be seen."""
    raw = connection.connection
    if raw is None:
        return False
    if connection.vendor == "sqlite":
        return bool(raw.in_transaction)
    if raw.pgconn.pipeline_status != PipelineStatus.OFF or raw.info.transaction_status == TransactionStatus.ACTIVE:
        return None
    if raw.info.transaction_status == TransactionStatus.IDLE:
        # Django turns psycopg's autocommit off inside atomic(): the next statement begins a transaction.
        return not raw.autocommit
    return bool(raw.info.transaction_status == TransactionStatus.INTRANS)


def tidy(connection: BaseDatabaseWrapper) -> None:
    """End a request as Django does: the next program gets a fresh connection."""
    assert not connection.in_atomic_block
    raw = connection.connection
    if raw is None:
        return
    if connection.vendor == "sqlite":
        raw.rollback()
        idle = True
    else:
        idle = raw.info.transaction_status == TransactionStatus.IDLE
    if not idle or not connection.is_usable():
        connection.close()
    connection.errors_occurred = False
