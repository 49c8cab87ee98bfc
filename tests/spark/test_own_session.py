"""A run in a session that the caller has made, with settings of its own."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from spark import session
from spark.common.errors import RunIncomplete
from tests.spark.conftest import Reconciler
from tests.spark.exports import export_parquet
from tests.spark.test_files import folders, orders_table
from tests.spark.world import START, Order, World

pytestmark = pytest.mark.timeout(300)
OWN = {
    "spark.sql.session.timeZone": "America/New_York",
    "spark.sql.timestampType": "TIMESTAMP_NTZ",
    "spark.sql.variant.allowDuplicateKeys": "false",
    "spark.sql.legacy.parquet.nanosAsLong": "true",
}


@pytest.mark.slow
def test_a_run_keeps_the_settings_of_the_session(reconcile: Reconciler, world: World, tmp_path: Path) -> None:
    """The messages have their times as INT96, as older versions of Spark write them."""
    first = Order(number=1)
    world.add(first, Order(number=2))
    # The last value of a repeated key counts.
    body = b'{"total": "1", ' + first.body[1:]
    world.broker.execute("UPDATE commit_log SET body = %s WHERE key = '1'", [body])
    world.app.execute("UPDATE orders_order SET total = 1 WHERE id = 2")
    pq.write_table(orders_table(world, "us"), tmp_path / "orders_order.parquet")
    export_parquet(world.broker, "message_v1", tmp_path / "message_v1.parquet")
    messages = pq.read_table(tmp_path / "message_v1.parquet")
    pq.write_table(messages, tmp_path / "message_v1.parquet", use_deprecated_int96_timestamps=True)
    conf = reconcile.spark.conf
    before = {name: conf.get(name, None) for name in OWN}
    try:
        for name, value in OWN.items():
            conf.set(name, value)
        result = folders(reconcile, "parquet", tmp_path)()
        assert {name: conf.get(name) for name in OWN} == OWN
    finally:
        for name, own in before.items():
            conf.unset(name) if own is None else conf.set(name, own)
    assert reconcile.findings(result) == [("2", "", "MISMATCH")]
    [found] = reconcile.rows(result)
    assert START.isoformat()[:19] in found["row"]


@pytest.mark.slow
def test_files_that_the_session_ignores_are_no_clean_run(
    reconcile: Reconciler, world: World, tmp_path: Path, spark_session: SparkSession
) -> None:
    world.add(Order(number=1))
    (tmp_path / "orders_order").mkdir()
    pq.write_table(orders_table(world, "us"), tmp_path / "orders_order" / "part-1.parquet")
    (tmp_path / "orders_order" / "part-2.parquet").write_bytes(b"PAR1 is damaged PAR1")
    export_parquet(world.broker, "message_v1", tmp_path / "message_v1.parquet")
    name = "spark.sql.files.ignoreCorruptFiles"
    spark_session.conf.set(name, "true")
    try:
        with pytest.raises(RunIncomplete, match=r"part-2\.parquet"):
            folders(reconcile, "parquet", tmp_path)()
        assert spark_session.conf.get(name) == "true"
    finally:
        spark_session.conf.unset(name)


def test_a_session_of_the_command_logs_no_generated_classes(spark_session: SparkSession) -> None:
    """Spark would log some five hundred lines about a class that it then does without."""
    loggers = spark_session._jvm.org.apache.logging.log4j.LogManager  # type: ignore[union-attr]
    assert loggers.getLogger(session._CODE_GENERATOR).getLevel().toString() == "OFF"
    assert loggers.getRootLogger().getLevel().toString() == "ERROR"
