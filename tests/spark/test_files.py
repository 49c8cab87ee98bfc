"""Exports: the same tables and views as CSV and Parquet give the same findings."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from spark.common.errors import RunIncomplete, UsageProblem
from spark.sources import files
from tests.spark.conftest import Reconciler
from tests.spark.exports import copy_out, export_csv, export_parquet
from tests.spark.test_runs import plant
from tests.spark.world import RULES, START, Order, World

pytestmark = pytest.mark.timeout(300)


@pytest.mark.soak
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


def folders(reconcile: Reconciler, orders: str, folder: Path) -> Callable[[], dict[str, Any]]:
    """Runs over `folder`, which holds the orders as `orders` (csv, parquet) and the messages as Parquet."""
    text = RULES.format(extra="", groups="")
    until = (START + timedelta(hours=3)).isoformat()
    for name, kind in (("APP", orders), ("BROKER", "parquet")):
        text = text.replace(f'env = "RECONCILE_{name}"', f'kind = "{kind}"\npath = "{folder}"\nwatermark = "{until}"')
    path = reconcile.rules(text=text)
    return lambda: reconcile.run(rules=path)


@pytest.mark.slow
def test_csv_tells_an_empty_text_from_null(reconcile: Reconciler, world: World, tmp_path: Path) -> None:
    world.add(Order(number=1), Order(number=2))
    world.app.execute("UPDATE orders_order SET customer = ''; ALTER TABLE orders_order ALTER customer DROP NOT NULL")
    world.app.execute("UPDATE orders_order SET customer = NULL WHERE id = 2")
    for customer, number in (('""', 1), ("null", 2)):
        body = f'{{"customer": {customer}, "total": "12.50", "paid_at": "{START.isoformat()}"}}'
        world.broker.execute("UPDATE commit_log SET body = %s WHERE key = %s", [body.encode(), str(number)])
    copy_out(world.app, "orders_order", tmp_path / "orders_order.csv")
    export_parquet(world.broker, "message_v1", tmp_path / "message_v1.parquet")
    run = folders(reconcile, "csv", tmp_path)
    assert reconcile.findings(run()) == []

    with (tmp_path / "orders_order.csv").open("a") as out:
        out.write("3,cut off\n")
    with pytest.raises(RunIncomplete, match=r"MALFORMED_RECORD_IN_PARSING|FAILED_READ_FILE"):
        run()


def orders_table(world: World, unit: str) -> pa.Table:
    names = ("id", "customer", "total", "paid_at")
    rows = world.app.execute(f"SELECT {', '.join(names)} FROM orders_order ORDER BY id").fetchall()
    table = pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows])
    moments = table["paid_at"].cast(pa.timestamp(unit, tz="UTC"))
    return table.set_column(3, "paid_at", moments)


@pytest.mark.slow
def test_parquet_with_nanoseconds_is_refused(reconcile: Reconciler, world: World, tmp_path: Path) -> None:
    """Also beside a file with microseconds, whose footer Spark takes for both."""
    world.add(Order(number=1), Order(number=2))
    folder = tmp_path / "orders_order"
    folder.mkdir()
    pq.write_table(orders_table(world, "ns"), folder / "part-2.parquet")
    export_parquet(world.broker, "message_v1", tmp_path / "message_v1.parquet")
    run = folders(reconcile, "parquet", tmp_path)
    with pytest.raises(UsageProblem, match=r"times in nanoseconds, .* coerce_timestamps='us'"):
        run()
    pq.write_table(orders_table(world, "us"), folder / "part-1.parquet")
    with pytest.raises((RunIncomplete, UsageProblem)):
        run()


def test_a_column_whose_name_is_also_the_path_of_a_field_is_refused(spark_session: SparkSession) -> None:
    """A run would compare the field of the struct without a word."""
    frame = spark_session.createDataFrame([("1", ("2",))], "`price.total` string, price struct<total: string>")
    with pytest.raises(UsageProblem, match=r"write `price\.total` in backticks for the column, \(price\)\.total for"):
        files._expression("price.total", frame)
    read = frame.select(*[files._expression(text, frame) for text in ("`price.total`", "(price).total")]).first()
    assert read is not None and tuple(read) == ("1", "2")
