"""How fast PostgreSQL is read into Spark: rows per second, against Spark's JDBC, ADBC alone and COPY TO /dev/null.

    python -m benchmarks.reconcile_source [ROWS]

The JDBC driver is looked for in $POSTGRES_JDBC_JAR and the local Maven repository
(mvn dependency:get -Dartifact=org.postgresql:postgresql:42.7.7).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from benchmarks import harness
from benchmarks.reconcile_data import RULES, fill_postgres
from spark import session
from spark.rules import file as rules_file
from spark.rules.rule import DatabaseRule
from spark.sources import adbc, contract, sql
from spark.sources.base import TableSelection
from spark.sources.postgres import PostgresSource

REPEATS = 3
GET_DRIVER = "mvn dependency:get -Dartifact=org.postgresql:postgresql:42.7.7"
MASTER = "local[2]"


def jdbc_jar() -> str:
    """The driver's jar, empty when there is none."""
    named = os.environ.get("POSTGRES_JDBC_JAR", "")
    found = sorted((Path.home() / ".m2/repository/org/postgresql/postgresql").glob("*/postgresql-*.jar"))
    return named or (str(found[-1]) if found else "")


def timed(name: str, rows: int, work: Callable[[], object]) -> float:
    """Print and return the median of rows per second."""
    rates = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        rates.append(rows / (time.perf_counter() - started))
    rates.sort()
    median = rates[len(rates) // 2]
    print(f"  {name:<44} {median:>12,.0f} rows/s  ({rates[0]:,.0f} to {rates[-1]:,.0f})", flush=True)
    return median


@contextlib.contextmanager
def over_tcp(conninfo: str) -> Iterator[str]:
    """The same database over TCP; through a relay where the server listens on a Unix socket only."""
    host = str(conninfo_to_dict(conninfo).get("host", ""))
    if not host.startswith("/"):
        yield conninfo
        return
    command = [sys.executable, "-m", "benchmarks.reconcile_relay", f"{host}/.s.PGSQL.5432"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as relay:
        assert relay.stdout is not None
        try:
            port = relay.stdout.readline().strip()
            yield make_conninfo(conninfo, host="127.0.0.1", port=port)
        finally:
            relay.kill()


def jdbc_read(spark: Any, conninfo: str, query: str, rows: int) -> None:
    info = conninfo_to_dict(conninfo)
    url = f"jdbc:postgresql://{info['host']}:{info['port']}/{info['dbname']}?user={info.get('user', 'postgres')}"
    reader = spark.read.format("jdbc").option("url", url).option("driver", "org.postgresql.Driver")
    options = {"dbtable": f"({query}) t", "fetchsize": "10000", "numPartitions": "8"}
    bounds = {"partitionColumn": "number", "lowerBound": "1", "upperBound": str(rows + 1)}
    consume(reader.options(**options, **bounds).load())


def consume(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()


def adbc_alone(conninfo: str, query: str) -> int:
    with adbc.connect(conninfo) as connection, connection.cursor() as cursor:
        cursor.execute(query)
        with cursor.fetch_record_batch() as reader:
            return sum(batch.num_rows for batch in reader)


def copy_to_nowhere(conninfo: str, query: str) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(f"COPY ({query}) TO '/dev/null' (FORMAT binary)".encode())


def ours(source: PostgresSource, selection: TableSelection) -> None:
    source.open([])
    consume(source.read([selection], None))
    source.close()


def query_of(database: DatabaseRule, selection: TableSelection) -> str:
    """The selection as one statement."""
    schema = database.schema if selection.in_broker else None
    return sql.select(selection, sql.table_name(selection.table, schema), sql.conditions(selection, None))


def compare(spark: Any, database: DatabaseRule, selection: TableSelection, rows: int, jar: str) -> None:
    """One table by all readers."""
    query = query_of(database, selection)
    conninfo = database.location
    mine = timed(
        "outbox_spark (ADBC → Arrow, one snapshot)", rows, lambda: ours(PostgresSource(spark, database), selection)
    )
    timed("ADBC alone, one connection", rows, lambda: adbc_alone(conninfo, query))
    timed("COPY … TO '/dev/null', one connection", rows, lambda: copy_to_nowhere(conninfo, query))
    if not jar:
        print(f"  Spark JDBC: not measured, there is no driver ({GET_DRIVER})")
        return
    numbered = query.replace("SELECT ", f'SELECT "{selection.span or "id"}" AS number, ', 1)
    with over_tcp(conninfo) as tcp:
        other = timed("Spark JDBC, 8 partitions by id", rows, lambda: jdbc_read(spark, tcp, numbered, rows))
    print(f"  outbox_spark reads {mine / other:.2f} times as many rows per second as JDBC")


def main(rows: int) -> None:
    """Fill a database, measure."""
    jar = jdbc_jar()
    with harness.server() as url:
        app, broker = fill_postgres(url, rows)
        os.environ.update(BENCH_APP=app, BENCH_BROKER=broker)
        rules = rules_file.parse(RULES.format(app='env = "BENCH_APP"', broker='env = "BENCH_BROKER"', extra=""))
        rule = rules.rules[0]
        spark = session.start(MASTER, {"spark.jars": jar} if jar else {})
        print(f"orders (6 columns), {rows:,} rows, {MASTER}")
        compare(spark, rules.databases["app"], contract.rows(rule), rows, jar)
        print(f"messages with bodies (8 columns), {rows:,} rows, {MASTER}")
        compare(spark, rules.databases["broker"], contract.messages(rule), rows, jar)
        spark.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
