"""Orders and their messages, the same in PostgreSQL and in Parquet, for the reconciliation benchmarks."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import psycopg

from outbox.broker import embedded
from outbox.broker.schema.install import install

CHUNK: Final = 500_000
RULES: Final = """
version = 1
[database.app]
{app}
[database.broker]
schema = "outbox"
{broker}
[broker]
database = "broker"
[[rule]]
name = "orders"
database = "app"
table = "orders_order"
key = "id"
when = "paid_at IS NOT NULL"
time = "paid_at"
topic = "order.paid"
grace = "0s"
late_after = "5m"
{extra}
[[rule.field]]
column = "total"
type = "decimal"
[[rule.field]]
column = "customer"
[[rule.field]]
column = "paid_at"
type = "timestamp"
"""
# The first pair is one step after START, and each pair one step after the one before.
START: Final = datetime(2025, 1, 1, tzinfo=UTC)
STEP: Final = timedelta(milliseconds=50)
# Rules with findings see every tenth of these pairs without its row, and all others of them with another total.
FINDING_EVERY: Final = 50_000
_ORDERS: Final = """
INSERT INTO orders_order
SELECT n, 'customer ' || n % 9973, (n % 10000) / 100.0, 'paid', timestamptz '2025-01-01Z' + n * interval '50 ms',
       timestamptz '2025-01-01Z' + n * interval '50 ms'
FROM generate_series({first}, {last}) n
"""
_LOG: Final = """
INSERT INTO commit_log (born_at, stored_at, transaction_id, message_id, topic_id, half, key, tag, content_type, body)
SELECT t, t, id, id, {topic}, true, n::text, '', 'application/json',
       convert_to('{{"order_id": ' || n || ', "customer": "customer ' || n % 9973 || '", "total": "'
                  || ((n % 10000) / 100.0)::numeric(12,2) || '", "paid_at": "'
                  || to_char(t AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"') || '"}}', 'UTF8')
FROM (SELECT n, timestamptz '2025-01-01Z' + n * interval '50 ms' AS t, uuidv7() AS id
      FROM generate_series({first}, {last}) n) made
ORDER BY n
"""
_OPS: Final = """
INSERT INTO op_log (decided_at, transaction_id, decision, decided_by, log_ids)
SELECT stored_at + interval '2 ms', transaction_id, 'C', 'P', ARRAY[log_id] FROM commit_log
WHERE log_id > (SELECT coalesce(max(log_ids[1]), 0) FROM op_log)
ORDER BY log_id
"""


def with_findings(rules: str) -> str:
    """The rules, but the rows of some pairs are left out, and some rows have another total than their message."""
    wrong = f"CASE WHEN id % {FINDING_EVERY} = 0 THEN total + 1 ELSE total END"
    left_out = f"paid_at IS NOT NULL AND id % {10 * FINDING_EVERY} <> 0"
    rules = rules.replace('column = "total"', f'column = "{wrong}"\nbody = "total"')
    return rules.replace('when = "paid_at IS NOT NULL"', f'when = "{left_out}"')


def fill_postgres(url: str, rows: int) -> tuple[str, str]:
    """Two databases with `rows` pairs; returns their connection strings."""
    app, broker = (embedded.create_database(url, f"bench_{name}_{rows}") for name in ("app", "broker"))
    with psycopg.connect(app, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE orders_order (id bigint PRIMARY KEY, customer text NOT NULL, total numeric(12,2) NOT NULL, "
            "status text NOT NULL, created_at timestamptz NOT NULL, paid_at timestamptz)"
        )
        _in_chunks(connection, rows, _ORDERS)
        connection.execute("CREATE INDEX ON orders_order (paid_at)")
        connection.execute("VACUUM ANALYZE")
    with psycopg.connect(broker, autocommit=True) as connection:
        install(connection, "outbox")
        connection.execute("SET search_path TO outbox")
        topic = connection.execute(
            "INSERT INTO topic (name, message_types, queue_count) VALUES ('order.paid', '{TRANSACTION}', 1) "
            "RETURNING topic_id"
        ).fetchone()
        assert topic is not None
        for first in range(1, rows + 1, CHUNK):
            last = min(rows, first + CHUNK - 1)
            connection.execute(_LOG.format(first=first, last=last, topic=topic[0]).encode())
            connection.execute(_OPS)
        connection.execute("VACUUM ANALYZE")
    return app, broker


def _in_chunks(connection: psycopg.Connection, rows: int, statement: str) -> None:
    for first in range(1, rows + 1, CHUNK):
        connection.execute(statement.format(first=first, last=min(rows, first + CHUNK - 1)).encode())


def write_parquet(spark: Any, folder: Path, rows: int) -> None:
    """The same pairs as Parquet, in the shape of the contract."""
    from pyspark.sql import functions as F

    number = F.col("id")
    paid_at = F.timestamp_micros(F.lit(1_735_689_600_000_000) + number * 50_000)
    total = (number % 10_000 / 100).cast("decimal(12,2)")
    customer = F.concat(F.lit("customer "), (number % 9973).cast("string"))
    source = spark.range(1, rows + 1, 1, 8)
    orders = source.select(
        "id", customer.alias("customer"), total.alias("total"), F.lit("paid").alias("status"), paid_at.alias("paid_at")
    )
    orders.write.mode("overwrite").parquet(str(folder / "orders_order"))
    when = F.date_format(paid_at, "yyyy-MM-dd'T'HH:mm:ss.SSSSSS'+00:00'")
    parts = (
        '{"order_id": ',
        number,
        ', "customer": "',
        customer,
        '", "total": "',
        total,
        '", "paid_at": "',
        when,
        '"}',
    )
    body = F.concat(*[F.lit(part) if isinstance(part, str) else part.cast("string") for part in parts])
    nothing = F.lit(None).cast("string")
    messages = source.select(
        number.alias("log_id"),
        F.uuid().alias("message_id"),
        nothing.alias("transaction_id"),
        F.lit("order.paid").alias("topic"),
        number.cast("string").alias("key"),
        F.lit("").alias("tag"),
        F.lit("application/json").alias("content_type"),
        body.cast("binary").alias("body"),
        paid_at.alias("stored_at"),
        F.lit(None).cast("timestamp").alias("deliver_at"),
        F.lit("committed").alias("state"),
        F.lit("P").alias("decided_by"),
        paid_at.alias("decided_at"),
    )
    messages.write.mode("overwrite").parquet(str(folder / "message_v1"))
