"""Looking at the broker's tables from outside."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, LiteralString
from uuid import UUID

from django.db import connections, transaction
from psycopg import sql

from outbox.broker.postgres import PostgresBroker
from outbox.contrib.django.engine.broker import flush, get_broker
from outbox.contrib.django.settings.conf import get_settings
from tests.django.sessions import in_session
from tests.django.shop.models import Effect
from tests.django.urls import Refused


@dataclass(frozen=True)
class Stored:
    """A message as it is in the log: decision 'C', 'R' or None."""

    message_id: UUID
    key: str
    half: bool
    decision: str | None
    decided_by: str | None


def stored() -> list[Stored]:
    """All messages in the broker, in log order, once the flusher is done."""
    flush(within_seconds=10)
    return [
        Stored(*row)
        for row in _rows(
            "SELECT l.message_id, l.key, l.half, o.decision::text, o.decided_by::text FROM {schema}.commit_log l"
            " LEFT JOIN {schema}.op_log o USING (transaction_id) ORDER BY l.log_id"
        )
    ]


def _rows(query: LiteralString) -> list[tuple[Any, ...]]:
    statement = sql.SQL(query).format(schema=sql.Identifier(get_settings().schema))
    return in_session(lambda connection: connection.execute(statement).fetchall())


def decisions() -> dict[str, str | None]:
    """Key of every message -> its decision."""
    return {item.key: item.decision for item in stored()}


def bodies() -> list[Any]:
    """The decoded JSON bodies, in log order."""
    return [json.loads(body) for (body,) in _rows("SELECT body FROM {schema}.commit_log ORDER BY log_id")]


def effects(alias: str = "default") -> list[str]:
    """The numbers of the effects of handlers."""
    return sorted(Effect.objects.using(alias).values_list("number", flat=True))


def execute(statement: str | sql.Composable, *parameters: Any, alias: str = "default") -> list[Any]:
    """Execute a statement on a database of the application; its rows, if it has any."""
    with connections[alias].cursor() as cursor:
        cursor.execute(statement, parameters or None)
        return cursor.fetchall() if cursor.description else []


@contextlib.contextmanager
def renamed(*tables: str, alias: str = "default") -> Iterator[None]:
    """These tables of the application are missing."""
    for table in tables:
        execute(f"ALTER TABLE {table} RENAME TO {table}_away", alias=alias)
    try:
        yield
    finally:
        for table in tables:
            execute(f"ALTER TABLE {table}_away RENAME TO {table}", alias=alias)


def incidents() -> list[tuple[str, str]]:
    """Kind and detail of every incident."""
    return [(kind, detail) for kind, detail in _rows("SELECT kind, detail FROM {schema}.incident")]


def postgres_broker() -> PostgresBroker:
    """The real broker."""
    broker = get_broker()
    assert isinstance(broker, PostgresBroker)
    return broker


def savepoint(using: str | None = None) -> Any:
    """A savepoint by hand: `savepoint_create` from Django 6.1 on, where the older name is deprecated."""
    make: Callable[..., Any] = getattr(transaction, "savepoint_create", None) or transaction.savepoint
    return make(using=using)


@contextlib.contextmanager
def rolled_back(using: str | None = None) -> Iterator[None]:
    """An atomic block that an exception leaves."""
    with contextlib.suppress(Refused), transaction.atomic(using=using):
        yield
        raise Refused
