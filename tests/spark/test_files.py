"""Exports: the same tables and views as CSV and Parquet give the same findings."""

from __future__ import annotations

import csv
from datetime import timedelta
from pathlib import Path

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark.errors import UsageProblem
from tests.spark.conftest import Reconciler
from tests.spark.test_runs import plant
from tests.spark.world import RULES, START, World

pytestmark = pytest.mark.timeout(300)


def export_csv(connection: psycopg.Connection, table: str, target: Path) -> None:
    cursor = connection.execute(f"SELECT * FROM {table}")
    assert cursor.description is not None
    with target.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow([column.name for column in cursor.description])
        writer.writerows([None if value is None else str(value) for value in row] for row in cursor)


def export_parquet(connection: psycopg.Connection, view: str, target: Path) -> None:
    cursor = connection.execute(f"SELECT * FROM {view}")
    assert cursor.description is not None
    names = [column.name for column in cursor.description]
    texts = ("message_id", "transaction_id")
    rows = [
        {name: str(value) if name in texts and value else value for name, value in zip(names, row, strict=True)}
        for row in cursor
    ]
    pq.write_table(pa.Table.from_pylist(rows), target)


def test_csv_and_parquet_give_the_same_findings(reconcile: Reconciler, world: World, tmp_path: Path) -> None:
    world.add_many(60)
    planted = plant(world)
    app, broker = tmp_path / "app", tmp_path / "broker"
    app.mkdir()
    broker.mkdir()
    export_csv(world.app, "orders_order", app / "orders_order.csv")
    export_parquet(world.broker, "message_v1", broker / "message_v1.parquet")
    text = RULES.format(extra="", groups="")
    until = (START + timedelta(hours=3)).isoformat()
    for name, kind, folder in (("APP", "csv", app), ("BROKER", "parquet", broker)):
        text = text.replace(f'env = "RECONCILE_{name}"', f'kind = "{kind}"\npath = "{folder}"\nwatermark = "{until}"')
    path = reconcile.rules(text=text)
    result = reconcile.run(rules=path)
    assert set(reconcile.findings(result)) == {found for found in planted if found[1] == ""}
    assert result["rules"][0]["until"] == (START + timedelta(hours=3, seconds=-30)).isoformat()

    (app / "orders_order.csv").rename(app / "moved.csv")
    with pytest.raises(UsageProblem, match=r"table 'orders_order' of 'app' is not there"):
        reconcile.run(rules=path)
