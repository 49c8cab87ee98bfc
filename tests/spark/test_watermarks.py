"""The watermark holds against every transaction that may still write, through pools and on replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest

from spark.errors import UsageProblem
from spark.rules import Database, Kind
from spark.sources import adbc
from spark.sources.base import Column, Reading, Selection
from spark.sources.postgres import PostgresSource
from tests.spark import pooler

SELECTION = Selection(table="orders", columns=(Column("key", "id"),), key="id")


@contextmanager
def opened(url: str) -> Iterator[tuple[PostgresSource, Reading]]:
    """A source with its snapshot; nothing here reads through Spark."""
    source = PostgresSource(
        cast(Any, None), Database(name="app", kind=Kind.POSTGRES, location=url), "outbox-reconcile x"
    )
    try:
        yield source, source.open([])
    finally:
        source.close()


def watermark(url: str) -> datetime:
    with opened(url) as (_, reading):
        assert reading.watermark is not None
        return reading.watermark


def began(connection: psycopg.Connection) -> datetime:
    """When the connection's open transaction began."""
    row = connection.execute("SELECT now()").fetchone()
    assert row is not None
    return cast(datetime, row[0])


def test_a_transaction_of_any_name_holds_the_watermark_back(new_database: Callable[..., str]) -> None:
    """An application may be called as we are, or have got a connection that was."""
    url = new_database()
    with psycopg.connect(url, application_name="outbox-reconcile") as slow:
        at = began(slow)
        assert watermark(url) <= at
        slow.rollback()
        assert watermark(url) > at


def test_our_own_transactions_do_not(new_database: Callable[..., str]) -> None:
    """Neither the snapshot of another run nor what its executors read."""
    url = new_database()
    with opened(url) as (source, _):
        held = source.query("SELECT now()")[0][0]
        with closing(adbc.connect(url)) as reader, reader.cursor() as cursor:
            for statement in adbc.begin(adbc.SNAPSHOT, "outbox-reconcile y", snapshot=source._snapshot):
                cursor.execute(statement)
            assert watermark(url) > held


@pytest.mark.skipif(pooler.PROGRAM is None, reason="pgbouncer is not installed")
def test_a_transaction_through_the_pool_that_we_use_holds_the_watermark_back(
    new_database: Callable[..., str], tmp_path: Path
) -> None:
    """The pool gives an application the connections that were ours, with whatever a session's setting left on them."""
    url = new_database()
    with pooler.pooled(url, tmp_path, size=3) as through:
        for _ in range(4):
            watermark(through)
        with psycopg.connect(through) as one, psycopg.connect(through) as two:
            at = min(began(one), began(two))
            assert watermark(url) <= at, "seen from outside of the pool"
            assert one.execute("SELECT current_setting('application_name')").fetchone() != ("outbox-reconcile x",)
            two.rollback()
            assert watermark(through) <= began(one), "seen through the pool"
            setting = "SELECT current_setting('row_security'), current_setting('statement_timeout')"
            assert one.execute(setting).fetchone() == ("on", "0")


def test_rows_hidden_by_policies_are_an_error(new_database: Callable[..., str]) -> None:
    """Without it, messages of rows that the reader may not see would be ORPHAN."""
    url = new_database()
    role = "reader_" + psycopg.conninfo.conninfo_to_dict(url)["dbname"]  # type: ignore[operator]
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id bigint PRIMARY KEY)")
        connection.execute("ALTER TABLE orders ENABLE ROW LEVEL SECURITY")
        connection.execute("CREATE POLICY few ON orders FOR SELECT USING (id < 3)")
        connection.execute(f"CREATE ROLE {role} LOGIN IN ROLE pg_read_all_stats")
        try:
            connection.execute(f"GRANT SELECT ON orders TO {role}")
            reader = psycopg.conninfo.make_conninfo(url, user=role)
            with opened(reader) as (source, _), pytest.raises(UsageProblem, match=r"not all its rows .*BYPASSRLS"):
                source.check(SELECTION)
            connection.execute(f"ALTER ROLE {role} BYPASSRLS")
            with opened(reader) as (source, _):
                source.check(SELECTION)
        finally:
            connection.execute(f"DROP OWNED BY {role}")
            connection.execute(f"DROP ROLE {role}")
