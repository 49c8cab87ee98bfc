"""A run beside migrations: it never stands between a migration and the application for longer than seconds."""

from __future__ import annotations

import io
import json
import threading
import time
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest
from pyspark.sql.datasource import InputPartition

from spark import archive, pipeline
from spark.common.errors import FAILURE, RunIncomplete
from spark.common.options import RunOptions
from spark.common.progress import Progress
from spark.rules import file as rules_file
from spark.sources import adbc
from spark.sources.adbc import PostgresReader
from spark.sources.base import Column, TableSelection, released
from spark.sources.databases import Sources
from spark.sources.postgres import PostgresSource
from tests.spark.conftest import Reconciler
from tests.spark.test_archive import archived_rules
from tests.spark.world import Order, World
from tests.support import eventually

pytestmark = pytest.mark.timeout(300)
# How long the application may wait for its table. Without the mend it waits for as long as the run lasts.
LONGEST = "8s"


class Migrating(Progress):
    """Changes a table at the start of a stage, and does not let the run go on before the application has read it."""

    def __init__(self, url: str, stage: str, table: str, reads: str) -> None:
        super().__init__(io.StringIO())
        self._url, self._stage, self._table, self._reads = url, stage, table, reads
        self._has_begun = False
        self.error: Exception | None = None
        self.took = 0.0

    def say(self, text: str) -> None:
        if text.startswith(self._stage) and not self._has_begun:
            self._has_begun = True
            migration = threading.Thread(target=self._migrate)
            migration.start()
            with psycopg.connect(self._url, autocommit=True) as application:
                eventually(lambda: self._waits(application), what="the migration that waits")
                began = time.monotonic()
                application.execute(f"SET statement_timeout = '{LONGEST}'")
                try:
                    application.execute(self._reads)
                except psycopg.Error as error:
                    self.error = error
                self.took = time.monotonic() - began
            if self.error is not None:  # The migration would wait for the end of this very run.
                with psycopg.connect(self._url, autocommit=True) as admin:
                    admin.execute("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE NOT granted")
            migration.join()

    def _migrate(self) -> None:
        with suppress(psycopg.Error), psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute(f"ALTER TABLE {self._table} ADD COLUMN note text")

    def _waits(self, connection: psycopg.Connection) -> bool:
        return connection.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone() is not None


@pytest.mark.parametrize(("stage", "extra"), [("stage scan", ""), ("stage checksum", 'bucket = "1h"')])
def test_a_run_gives_way_to_a_migration(reconcile: Reconciler, world: World, stage: str, extra: str) -> None:
    """With checksums, the session that computes them is the one that gives way."""
    world.add(Order(number=1))
    options = RunOptions(rules=reconcile.rules(groups=(), extra=extra), output=str(reconcile.folder / "out"))
    migrating = Migrating(world.app_url, stage, "orders_order", "SELECT count(*) FROM orders_order")
    with pytest.raises(RunIncomplete) as raised:
        pipeline.run(reconcile.spark, options, migrating)
    assert migrating.error is None
    assert migrating.took < 5
    assert "ALTER TABLE orders_order ADD COLUMN note text" in str(raised.value)
    assert "Run it again" in str(raised.value)
    assert raised.value.exit_code == 3
    assert not (reconcile.folder / "out" / "result.json").exists()
    # The migration is done, and nothing of the run is left.
    assert world.app.execute("SELECT note FROM orders_order").fetchall() == [(None,)]
    assert world.app.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone() == (0,)


def test_an_archive_gives_way_to_a_migration(reconcile: Reconciler, world: World, tmp_path: Path) -> None:
    world.add(Order(number=1))
    path = reconcile.rules(text=archived_rules(tmp_path))
    migrating = Migrating(world.broker_url, "stage write", "outbox.op_log", "SELECT count(*) FROM outbox.op_log")
    with pytest.raises(RunIncomplete, match=r"ALTER TABLE outbox\.op_log"):
        archive.Archive(reconcile.spark, rules_file.load(path), migrating).run()
    assert migrating.error is None


def test_a_short_wait_for_a_lock_does_not_end_a_run(reconcile: Reconciler, world: World) -> None:
    """Retention of the ledger and upgrades of the broker wait for less than a second, and try again."""
    sources = Sources(reconcile.spark, rules_file.load(reconcile.rules(groups=())))
    with released(sources.all):
        sources.open_all()
        source = sources["app"]
        assert isinstance(source, PostgresSource)
        source.query("SELECT 1 FROM orders_order")
        with psycopg.connect(world.app_url, autocommit=True) as connection:
            connection.execute("SET lock_timeout = '200ms'")
            for _ in range(10):
                with pytest.raises(psycopg.errors.LockNotAvailable):
                    connection.execute("ALTER TABLE orders_order ADD COLUMN note text")
        assert source.gave_way() is None
        assert source.query("SELECT 1") == [(1,)]


def test_a_run_that_waits_for_a_lock_ends(reconcile: Reconciler, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adbc, "LOCK_SECONDS", 1)
    world.add(Order(number=1))
    columns = (Column("id", "id"),)
    schema = TableSelection(table="orders_order", columns=columns, key="id").schema
    reader = PostgresReader({"url": world.app_url, "queries": json.dumps([])}, schema)
    query = 'SELECT "id"::text AS "id" FROM "orders_order"'
    assert [batch.to_pydict() for batch in reader.read(InputPartition(query))] == [{"id": ["1"]}]
    with psycopg.connect(world.app_url) as migration:
        migration.execute("LOCK TABLE orders_order IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(RunIncomplete, match=r"waited 1 s for a lock.*Run the reconciliation again"):
            reconcile.run()
        with pytest.raises(RuntimeError, match=rf"{FAILURE} the run waited 1 s for a lock.*reading \"orders_order\""):
            list(reader.read(InputPartition(query)))
