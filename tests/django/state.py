"""Looking at the broker's tables from outside."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg
from django.db import transaction

from outbox.broker.postgres import PostgresBroker
from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.django.engine.broker import flush, get_broker
from outbox.contrib.django.settings.conf import get_settings
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
    with psycopg.connect(alias_conninfo(get_settings().broker), autocommit=True) as connection:
        connection.execute("SELECT set_config('search_path', %s, false)", [get_settings().schema])
        rows = connection.execute(
            "SELECT l.message_id, l.key, l.half, o.decision::text, o.decided_by::text FROM commit_log l "
            "LEFT JOIN op_log o USING (transaction_id) ORDER BY l.log_id"
        ).fetchall()
    return [Stored(*row) for row in rows]


def decisions() -> dict[str, str | None]:
    """Key of every message -> its decision."""
    return {item.key: item.decision for item in stored()}


def bodies() -> list[Any]:
    """The decoded JSON bodies, in log order."""
    with psycopg.connect(alias_conninfo(get_settings().broker), autocommit=True) as connection:
        return [
            json.loads(body) for (body,) in connection.execute("SELECT body FROM outbox.commit_log ORDER BY log_id")
        ]


def incidents() -> list[tuple[str, str]]:
    """Kind and detail of every incident."""
    with psycopg.connect(alias_conninfo(get_settings().broker), autocommit=True) as connection:
        rows: list[tuple[Any, ...]] = connection.execute("SELECT kind, detail FROM outbox.incident").fetchall()
    return [(kind, detail) for kind, detail in rows]


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
