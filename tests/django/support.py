"""Shared helpers that use the broker, and commands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any
from uuid import uuid4

from django.core.management import call_command

from outbox.broker.database.connection import Connection
from outbox.broker.database.executor import Executor
from outbox.broker.leading import Sequencer
from outbox.broker.operations.audit import count_messages
from outbox.contrib.django.database.aliases import broker_database
from outbox.contrib.django.engine.broker import flush
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.ports import ConsumeCounts
from outbox.utils import faults
from tests.django.sessions import broker_connection, in_session


def sequence() -> None:
    """Queue everything that is decided."""
    flush(within_seconds=5)
    in_session(_sequence)


def _sequence(connection: Connection) -> None:
    sequencer = Sequencer(broker_database(), uuid4())
    while sequencer.run_once(connection).appended:
        pass


def consume() -> ConsumeCounts:
    """Queue everything that is decided, and let the registered handlers have it."""
    sequence()
    return consumer_runtime().run_once()


def handle_all() -> None:
    """Consume as often as a second delivery, if there were one, would need to come through."""
    for _ in range(3):
        consume()


def broker_sql(statement: str, *values: Any) -> list[Any]:
    """Execute a statement on the broker; its rows, if it has any."""
    with broker_connection() as (connection, _):
        cursor = connection.execute(statement.encode(), values or None)
        return cursor.fetchall() if cursor.description else []


def differences() -> list[str]:
    """What the audit finds: messages that are counted in no state, or in two."""
    with broker_connection() as (connection, schema):
        return count_messages(Executor(connection, schema)).differences()


@contextmanager
def end_messages_lost() -> Iterator[None]:
    """Every publish call of the block reports no end to the broker: only check-back can decide."""
    faults.arm("producer.before_end=raise")
    try:
        yield
        flush(within_seconds=5)
    finally:
        faults.arm("")


def ended(*arguments: str) -> tuple[int, str]:
    """The exit code and the output of a command."""
    out, code = StringIO(), 0
    try:
        call_command(*arguments, stdout=out, no_color=True)
    except SystemExit as end:
        code = int(str(end.code))
    return code, out.getvalue()


def call(*arguments: str) -> str:
    """The output of a command that ends with 0."""
    code, said = ended(*arguments)
    assert code == 0, said
    return said


def call_json(*arguments: str) -> Any:
    """The JSON that a command prints."""
    return json.loads(call(*arguments, "--json"))
