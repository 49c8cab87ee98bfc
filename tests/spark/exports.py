"""Tables and views as files, as a nightly job would export them."""

from __future__ import annotations

import csv
from datetime import datetime
from pathlib import Path

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq

from spark.sources import contract
from tests.spark.world import World

TABLES = ("orders_order", "logistics_shipment", "points_entry", "cart_clearance")
VIEWS = (
    "message_v1",
    "dead_letter_v1",
    "timed_out_v1",
    "delivery_v1",
    "topic_v1",
    "group_v1",
    "offset_v1",
    "queue_entry_v1",
)
TIME = pa.timestamp("us", tz="UTC")
TYPES = {"bigint": pa.int64(), "bytea": pa.binary(), "timestamp with time zone": TIME}
# Transactions open at this time have not committed yet, so the export may lack them.
COMPLETE = (
    "SELECT least(now(), min(xact_start)) FROM pg_stat_activity WHERE datname = current_database() "
    "AND pid <> pg_backend_pid()"
)


def export_csv(connection: psycopg.Connection, table: str, target: Path) -> None:
    """As a program writes it: every value as a text, nothing where there is none."""
    cursor = connection.execute(f"SELECT * FROM {table}")
    assert cursor.description is not None
    with target.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow([column.name for column in cursor.description])
        writer.writerows([None if value is None else str(value) for value in row] for row in cursor)


def copy_out(connection: psycopg.Connection, table: str, target: Path) -> None:
    """As psql's \\copy writes it: "" is an empty text, nothing is null."""
    with target.open("wb") as out, connection.cursor().copy(f"COPY {table} TO STDOUT (FORMAT csv, HEADER)") as rows:
        for block in rows:
            out.write(block)


def export_parquet(connection: psycopg.Connection, view: str, target: Path) -> None:
    """One file."""
    cursor = connection.execute(f"SELECT * FROM {view}")
    assert cursor.description is not None
    names = [column.name for column in cursor.description]
    texts = ("message_id", "transaction_id")
    rows = [
        {name: str(value) if name in texts and value else value for name, value in zip(names, row, strict=True)}
        for row in cursor
    ]
    # Without a row, the columns of a view have the types that the rules expect.
    kinds = contract.VIEWS.get(view, {})
    empty = pa.schema([(name, TYPES.get(kinds.get(name, ""), pa.string())) for name in names])
    pq.write_table(pa.Table.from_pylist(rows, None if rows else empty), target)


def export(world: World, kind: str, folder: Path) -> datetime:
    """Everything that the rules read, as `kind`, while others may write; returns up to when it is complete.

    One snapshot per database, the application's first: a row that it shows has its half message in the second.
    """
    folder.mkdir(exist_ok=True)
    (complete,) = world.app.execute(COMPLETE).fetchone() or (None,)
    assert isinstance(complete, datetime)
    sides: list[tuple[psycopg.Connection, tuple[str, ...]]] = [(world.app, TABLES), (world.broker, VIEWS)]
    for connection, tables in sides:
        with connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            for table in tables:
                if kind == "csv":
                    copy_out(connection, f"(SELECT * FROM {table})", folder / f"{table}.csv")
                else:
                    export_parquet(connection, table, folder / f"{table}.parquet")
    return complete
