"""The watermark holds against every transaction that may still write, through pools and on replicas."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest

from outbox.broker import embedded
from spark.common.errors import UsageProblem
from spark.rules.rule import DatabaseRule, SourceKind
from spark.sources import adbc
from spark.sources.base import Column, SourceBoundary, TableSelection
from spark.sources.postgres import PostgresSource
from tests import pooler
from tests.spark import replica
from tests.support import eventually

SELECTION = TableSelection(table="orders", columns=(Column("key", "id"),), key="id")


@contextmanager
def opened(url: str) -> Iterator[tuple[PostgresSource, SourceBoundary]]:
    """A source with its snapshot; nothing here reads through Spark."""
    database = DatabaseRule(name="app", kind=SourceKind.POSTGRES, location=url)
    source = PostgresSource(cast(Any, None), database, "outbox-reconcile x")
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


@pytest.mark.parametrize("version", pooler.EVERY_VERSION)
def test_a_transaction_through_the_pool_that_we_use_holds_the_watermark_back(
    version: pooler.Version, new_database: Callable[..., str], tmp_path: Path
) -> None:
    """The pool gives our former connections to an application, with all session settings that are left on them."""
    url = new_database()
    with pooler.running(url, tmp_path, size=3, version=version) as running:
        through = running.url
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


@pytest.fixture
def both(new_database: Callable[..., str]) -> Iterator[tuple[str, str]]:
    """The URLs of a database and of its streaming replica."""
    if embedded.URL_VARIABLE in os.environ:
        pytest.skip(f"{embedded.URL_VARIABLE} names a server that may not be copied")
    url = new_database()
    # Not under pytest's folder: another run of it, as it starts, shuts that for the server's user again.
    with tempfile.TemporaryDirectory(prefix="outbox-replica-", ignore_cleanup_errors=True) as folder:
        with replica.streaming(url, Path(folder)) as standby:
            yield url, standby


def caught_up(standby: str, past: datetime) -> bool:
    """Whether the replica has replayed a transaction that ended after `past`."""
    with psycopg.connect(standby) as connection:
        row = connection.execute("SELECT pg_last_xact_replay_timestamp() > %s", [past]).fetchone()
        return row is not None and bool(row[0])


@pytest.mark.slow
def test_a_transaction_of_the_primary_holds_the_watermark_of_its_replica_back(both: tuple[str, str]) -> None:
    """It began before what the replica has replayed, and has written nothing yet: the replica cannot know of it."""
    primary, standby = both
    with psycopg.connect(primary, autocommit=True) as other, psycopg.connect(primary) as slow:
        other.execute("CREATE TABLE orders (id bigint PRIMARY KEY)")
        at = began(slow)
        other.execute("INSERT INTO orders VALUES (1)")
        eventually(lambda: caught_up(standby, at), what="the replica")
        with opened(standby) as (_, reading):
            assert reading.watermark is not None and reading.watermark <= at - timedelta(minutes=59)
            assert "longest_transaction" in reading.notes[0], "it is said why rows are judged later"
