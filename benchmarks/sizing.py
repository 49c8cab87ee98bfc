"""Bytes of disk and of WAL per message, by table: the figures of docs/operations/sizing.md.

Each order is a transaction of its own on the two-phase path. The messages are handled with the inbox in one pass, and
then deleted, as retention and pruning do at their time. Tables are measured with their indexes, and without the space
that an empty table has. OUTBOX_BENCH_MESSAGES: messages.
"""

from __future__ import annotations

import itertools
import json
import os

import psycopg

from benchmarks.bulk import BODY
from benchmarks.django_setup import TOPIC, configure
from benchmarks.harness import server, table
from outbox.broker import embedded

MESSAGES = int(os.environ.get("OUTBOX_BENCH_MESSAGES", "20000"))
# The tables that grow with the messages, and the alias of their database.
TABLES = {
    "commit_log": "broker",
    "op_log": "broker",
    "consume_queue": "broker",
    "outbox_ledger": "default",
    "outbox_inbox": "default",
}
_SIZES = """
SELECT pg_table_size(oid), pg_indexes_size(oid) FROM pg_class
WHERE relname = %s AND relkind = 'r' AND relnamespace::regnamespace::text IN ('outbox', 'public')
"""


def main() -> None:
    print(f"\nsizing: {MESSAGES:,} messages of {len(BODY)} bytes on the two-phase path, one per transaction, inbox on")
    # No checkpoint and no autovacuum, so that hardly any record of the WAL has a full page image.
    with server(checkpoint_timeout="1d", autovacuum="off", synchronous_commit="off") as url:
        urls = {name: embedded.create_database(url, name) for name in ("application", "broker")}
        configure(urls["application"], urls["broker"])
        with psycopg.connect(url, autocommit=True) as watching:
            measure({"default": urls["application"], "broker": urls["broker"]}, watching)


def measure(urls: dict[str, str], watching: psycopg.Connection) -> None:
    from django.db import transaction

    from benchmarks.shop.models import Effect, Order
    from outbox.contrib.django import publish, subscriber
    from outbox.contrib.django.engine.broker import reset_broker
    from outbox.contrib.django.worker.drain import drain, settle

    @subscriber(TOPIC, group="sizing")
    def handle(delivery: object) -> None:
        Effect.objects.create(number=1)

    body = json.loads(BODY)

    def place(count: int) -> None:
        for _ in range(count):
            with transaction.atomic():
                Order.objects.create(customer="c", total=1, status="new")
                publish(TOPIC, body)

    place(1)
    drain()
    before = sizes(urls)
    positions = [position(watching)]
    place(MESSAGES)
    settle()
    positions.append(position(watching))
    assert drain().handled == MESSAGES
    positions.append(position(watching))
    after = sizes(urls)
    reset_broker()
    removed = {name: remove(urls[alias], name, watching) for name, alias in TABLES.items()}

    rows = []
    for name in TABLES:
        heap, indexes = ((after[name][part] - before[name][part]) / MESSAGES for part in (0, 1))
        rows.append([name, f"{heap:.0f}", f"{indexes:.0f}", f"{heap + indexes:.0f}", f"{removed[name] / MESSAGES:.0f}"])
    table("bytes per message", ["table", "rows", "indexes", "disk", "WAL of its removal"], rows)
    published, handled = ((end - begin) / MESSAGES for begin, end in itertools.pairwise(positions))
    total = published + handled + sum(removed.values()) / MESSAGES
    table(
        "WAL bytes per message, of both databases and the business rows",
        ["order, publish, queue", "handle", "removal", "whole life"],
        [[f"{published:,.0f}", f"{handled:,.0f}", f"{sum(removed.values()) / MESSAGES:,.0f}", f"{total:,.0f}"]],
    )


def sizes(urls: dict[str, str]) -> dict[str, tuple[int, int]]:
    """Bytes of each table, and of its indexes."""
    found = {}
    for name, alias in TABLES.items():
        with psycopg.connect(urls[alias]) as connection:
            row = connection.execute(_SIZES, [name]).fetchone()
            assert row is not None, name
            found[name] = (int(row[0]), int(row[1]))
    return found


def remove(url: str, name: str, watching: psycopg.Connection) -> int:
    """Delete all rows and vacuum; the bytes of WAL."""
    schema = "outbox." if not name.startswith("outbox_") else ""
    with psycopg.connect(url, autocommit=True) as connection:
        # The guard of the ledger refuses to delete its rows; pruning deletes those that it has proven to be decided.
        connection.execute("SET session_replication_role = replica")
        start = position(watching)
        connection.execute(f"DELETE FROM {schema}{name}".encode())
        connection.execute(f"VACUUM (TRUNCATE off) {schema}{name}".encode())
    return position(watching) - start


def position(watching: psycopg.Connection) -> int:
    row = watching.execute("SELECT (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint").fetchone()
    assert row is not None
    return int(row[0])


if __name__ == "__main__":
    main()
