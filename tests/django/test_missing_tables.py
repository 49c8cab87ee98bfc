"""Tables that no migration made are named at the earliest moment, and nothing is half-done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.core.management import CommandError, call_command
from django.db import connections, transaction

from outbox.contrib.django import publish, subscriber
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.engine.broker import reset_broker
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.errors import ConfigurationError, SchemaError
from tests.django.state import stored

pytestmark = pytest.mark.usefixtures("empty_log")


@contextmanager
def renamed(table: str) -> Iterator[None]:
    def rename(before: str, after: str) -> None:
        with connections["default"].cursor() as cursor:
            cursor.execute(f"ALTER TABLE {before} RENAME TO {after}")

    rename(table, f"{table}_away")
    try:
        yield
    finally:
        rename(f"{table}_away", table)


def test_publishing_without_the_ledgers_tables() -> None:
    with renamed("outbox_ledger_identity"):
        with pytest.raises(ConfigurationError, match=r"migrate --database=default.*Nothing was published"):
            with transaction.atomic():
                publish("orders", {})
    assert stored() == []


def test_consuming_without_the_inbox(no_subscribers: None) -> None:
    @subscriber("orders", group="needs-inbox")
    def handler(delivery: object) -> None:
        """Would need an inbox."""

    with renamed("outbox_inbox"), pytest.raises(ConfigurationError, match=r"'outbox_inbox' is missing on 'default'"):
        consumer_runtime()


def test_publishing_to_tables_newer_than_the_code() -> None:
    with broker_connection() as (connection, _):
        connection.execute("UPDATE outbox.schema_version SET minimum_code = 99")
        try:
            reset_broker()
            with pytest.raises(SchemaError, match="newer than this code"), transaction.atomic():
                publish("orders", {})
            with pytest.raises(CommandError, match="newer than this code"):
                call_command("migrate", database="broker", verbosity=0)
        finally:
            connection.execute("UPDATE outbox.schema_version SET minimum_code = 1")
            reset_broker()
    assert stored() == []
