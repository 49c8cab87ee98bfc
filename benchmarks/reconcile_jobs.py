"""One job of benchmarks.reconcile_goals in a process of its own; prints its seconds as JSON."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
from pyspark.sql import functions as F

from benchmarks.reconcile_data import START, STEP
from spark import pipeline, session
from spark.common.options import RunOptions
from spark.common.progress import Progress
from spark.judging import classify, evidence
from spark.rules import file as rules_file
from spark.rules.rule import DatabaseRule
from spark.sources import contract, sql
from spark.sources.base import TableSelection

BODY = "order_id string, customer string, total decimal(12,2), paid_at timestamp"


def whole_run(spark: Any, name: str, folder: Path, *, full: bool = True) -> None:
    options = RunOptions(rules=folder / f"{name}.toml", output=str(folder / f"out-{name}"), full=full)
    result = pipeline.run(spark, options, Progress(io.StringIO()))
    assert result["status"] == ("findings" if name == "findings" else "clean"), result["totals"]


def date_back(folder: Path, rows: int) -> None:
    """Let the result of the job `checksum` end before the last hundredth of the pairs, as if these were new."""
    path = folder / "out-checksum" / "result.json"
    result = json.loads(path.read_text())
    until = (START + rows * 0.99 * STEP).isoformat()
    for rule in result["rules"]:
        rule["until"], rule["looked_back"] = until, {"at": until, "from": None}
    path.write_text(json.dumps(result))


def plain_join(spark: Any, folder: Path) -> None:
    """A program written by hand for this table: full outer join, the same comparisons, count per outcome."""
    orders = spark.read.parquet(str(folder / "orders_order")).where("paid_at IS NOT NULL")
    orders = orders.select(F.col("id").cast("string").alias("key"), "customer", "total", "paid_at")
    messages = spark.read.parquet(str(folder / "message_v1")).where("topic = 'order.paid' AND state = 'committed'")
    body = F.from_json(F.col("body").cast("string"), BODY)
    messages = messages.select(F.col("key").alias("message_key"), body.alias("b"), "decided_at")
    joined = orders.join(messages, F.col("key") == F.col("message_key"), "full_outer")
    same = (
        F.col("customer").eqNullSafe(F.col("b.customer"))
        & F.col("total").eqNullSafe(F.col("b.total"))
        & F.col("paid_at").eqNullSafe(F.col("b.paid_at"))
    )
    outcome = (
        F.when(F.col("message_key").isNull(), "LOST")
        .when(F.col("key").isNull(), "ORPHAN")
        .when(~same, "MISMATCH")
        .when(F.col("decided_at") > F.col("paid_at") + F.expr("INTERVAL 5 MINUTES"), "LATE")
        .otherwise("OK")
    )
    counts = joined.groupBy(outcome.alias("outcome")).count().collect()
    assert [row["outcome"] for row in counts] == ["OK"], counts


def command(folder: Path, name: str, master: str) -> None:
    """The command as a process of its own, so that the start of Python and of Spark is included."""
    rules, output = folder / f"{name}.toml", folder / f"out-command-{name}"
    options = ["--rules", str(rules), "--output", str(output), "--full", "--quiet", "--master", master]
    subprocess.run([sys.executable, "-m", "spark", "run", *options], check=True, stdout=subprocess.DEVNULL)


def program(folder: Path, master: str, *, joins: bool) -> None:
    """A whole program by hand: the start of Python and of Spark, then the plain join or a job over one row."""
    spark = session.start(master)
    if joins:
        plain_join(spark, folder)
    else:
        spark.range(1).collect()
    spark.stop()


def keys(spark: Any, folder: Path, rows: int, *, is_hot: bool) -> None:
    """Gather and classify all keys. If `is_hot`, all messages have the key of one order."""
    rule = rules_file.load(folder / "parquet.toml").rules[0]
    messages = spark.read.parquet(str(folder / "message_v1")).select(
        F.lit("1").alias("key") if is_hot else F.col("key"),
        F.col("stored_at").alias("at"),
        "log_id",
        "decided_at",
        "deliver_at",
        "state",
        "content_type",
        "body",
    )
    orders = spark.read.parquet(str(folder / "orders_order")).select(
        F.lit(0).alias("kind"),
        F.col("id").cast("string").alias("key"),
        F.col("paid_at").alias("at"),
        F.col("total").cast("string").alias("f0"),
        F.col("customer").alias("f1"),
        F.unix_micros("paid_at").cast("string").alias("f2"),
    )
    sides = [evidence.table_side(orders, rule), evidence.broker_side(messages, rule)]
    from datetime import UTC, datetime

    end = datetime(2030, 1, 1, tzinfo=UTC)
    window = classify.Window(None, end, end)
    found = classify.subjects(classify.with_classes(evidence.gather(sides, rule, end), rule, window), rule, window)
    counts = {row["class"]: row["count"] for row in found.groupBy("class").count().collect()}
    assert counts == ({"LOST": rows - 1, "DUPLICATE": 1} if is_hot else {}), counts


def copy_to_nowhere(conninfo: str, query: str) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(f"COPY ({query}) TO '/dev/null' (FORMAT binary)".encode())


def query_of(database: DatabaseRule, selection: TableSelection) -> str:
    """The selection as one statement."""
    schema = database.schema if selection.in_broker else None
    return sql.select(selection, sql.table_name(selection.table, schema), sql.conditions(selection, None))


def floor(folder: Path) -> None:
    """Copy both tables, as a run selects them, at the same time."""
    rules = rules_file.load(folder / "checksum.toml")
    rule = rules.rules[0]
    sides = [(rules.databases[rule.database], contract.rows(rule))]
    sides.append((rules.databases[rules.broker], contract.messages(rule)))
    with ThreadPoolExecutor() as pool:
        reads = [
            pool.submit(copy_to_nowhere, database.location, query_of(database, selection))
            for database, selection in sides
        ]
        for each in reads:
            each.result()


def main(name: str, folder: Path, rows: int, master: str) -> None:
    """Start Spark (but for `copy` and a command), warm it up by nothing, run the job once."""
    if name == "copy":
        started = time.perf_counter()
        floor(folder)
        print(json.dumps({"seconds": time.perf_counter() - started}))
        return
    kind, _, what = name.partition("-")
    if kind == "inner":
        program(folder, master, joins=what == "join")
        return
    if kind in ("command", "program"):
        started = time.perf_counter()
        if kind == "command":
            command(folder, what, master)
        else:
            inner = [sys.executable, "-m", "benchmarks.reconcile_jobs", f"inner-{what}", str(folder), str(rows), master]
            subprocess.run(inner, check=True)
        print(json.dumps({"seconds": time.perf_counter() - started}))
        return
    spark = session.start(master)
    if name == "second":
        date_back(folder, rows)
    started = time.perf_counter()
    if name == "join":
        plain_join(spark, folder)
    elif name == "second":
        whole_run(spark, "checksum", folder, full=False)
    elif name in ("hot", "even"):
        keys(spark, folder, rows, is_hot=name == "hot")
    else:
        whole_run(spark, name, folder)
    print(json.dumps({"seconds": time.perf_counter() - started}))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
