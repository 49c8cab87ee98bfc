"""`read_on = "driver"`: executors need no database, and one connection of a pool is enough for a run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from pyspark.sql import SparkSession

from spark.common.store import Store
from spark.rules.rule import DatabaseRule, SourceKind
from spark.sources.base import Column, ColumnKind, TableSelection
from spark.sources.postgres import PostgresSource
from spark.sources.staged import Staging
from tests import pooler
from tests.spark.conftest import Reconciler
from tests.spark.test_watermarks import both
from tests.spark.world import RULES, Order, World

pytestmark = pytest.mark.timeout(600)
__all__ = ["both"]

SELECTION = TableSelection(
    table="orders",
    columns=(
        Column("key", "id"),
        Column("at", "paid_at", ColumnKind.TIMESTAMP),
        Column("body", "b", ColumnKind.BINARY),
    ),
    key="id",
)


@pytest.mark.slow
def test_a_run_through_a_pool_with_one_connection(reconcile: Reconciler, world: World, tmp_path: Path) -> None:
    """In PgBouncer's transaction mode the reading transaction has the only connection, so executors could get none."""
    world.add(*(Order(number=number) for number in (1, 2, 3)))
    world.app.execute("UPDATE orders_order SET total = 1 WHERE id = 2")
    world.app.execute("DELETE FROM orders_order WHERE id = 3")
    # Not under pytest's folder: another run of it, as it starts, shuts that for PgBouncer's user again.
    with (
        tempfile.TemporaryDirectory(prefix="outbox-pool-") as of_app,
        tempfile.TemporaryDirectory(prefix="outbox-pool-") as of_broker,
        pooler.pooled(world.app_url, Path(of_app), size=1) as app,
        pooler.pooled(world.broker_url, Path(of_broker), size=1) as broker,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RECONCILE_APP", app)
        patch.setenv("RECONCILE_BROKER", broker)
        text = RULES.format(extra="", groups="").replace('"\n\n[database.b', '"\nread_on = "driver"\n\n[database.b')
        text = text.replace('schema = "outbox"', 'schema = "outbox"\nread_on = "driver"')
        assert text.count("read_on") == 2
        result = reconcile.run(rules=reconcile.rules(text=text))
    assert set(reconcile.findings(result)) == {("2", "", "MISMATCH"), ("3", "", "ORPHAN")}
    # The rows of the databases do not stay in the output folder.
    assert not list((tmp_path / reconcile.output).glob("runs/*/staged/*/*"))


@pytest.mark.slow
def test_a_replica_is_read_in_its_snapshot(
    both: tuple[str, str], spark_session: SparkSession, tmp_path: Path, new_database: Callable[..., str]
) -> None:
    primary, standby = both
    store = Store(str(tmp_path / "out"))
    store.check_writable()
    with psycopg.connect(primary, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id bigint PRIMARY KEY, paid_at timestamptz, b bytea)")
        connection.execute("INSERT INTO orders VALUES (1, '2025-06-01 12:00:00.000001+00', '\\x00ff'), (2, NULL, NULL)")
        of_primary = DatabaseRule(name="primary", kind=SourceKind.POSTGRES, location=primary)
        database = DatabaseRule(name="app", kind=SourceKind.POSTGRES, location=standby, primary=of_primary)
        source = PostgresSource(spark_session, database, "outbox-reconcile x", Staging(store, "run", "app"))
        try:
            boundary = source.open([])
            assert boundary.is_replica
            assert boundary.watermark is not None
            connection.execute("INSERT INTO orders VALUES (3, NULL, NULL)")
            frame = source.read([SELECTION], None)
            rows = [(row[0], row[1], row[2]) for row in frame.selectExpr("key", "unix_micros(at)", "body").collect()]
            assert sorted(rows) == [("1", 1_748_779_200_000_001, bytearray(b"\x00\xff")), ("2", None, None)]
            assert all("/runs/run/staged/app/" in name for name in frame.inputFiles())
        finally:
            source.close()
    assert not (tmp_path / "out" / "runs" / "run" / "staged" / "app").exists()
