"""Bytes of disk and of WAL per message: the figures of docs/operations/sizing.md.

On the two-phase path each database has a server of its own, because a server counts its WAL for all its databases. Each
order is a transaction of its own. The messages are handled with the inbox in one pass, and then deleted, as retention
and pruning do at their time. Tables are measured with their indexes, and without the space that an empty table has.
OUTBOX_BENCH_MESSAGES: messages per path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import psycopg

from benchmarks.bulk import BODY
from benchmarks.django_setup import TOPIC, configure
from benchmarks.harness import child_arguments, server, table
from benchmarks.sizing_plan import APPLICATION, ATOMIC, BOTH, BROKER, BYTES, DATABASE_OF, ONE, PHASES, TWO_PHASE, WAL
from outbox.broker import embedded

MESSAGES: Final = int(os.environ.get("OUTBOX_BENCH_MESSAGES", "20000"))
_SIZES: Final = """
SELECT pg_table_size(oid), pg_indexes_size(oid) FROM pg_class
WHERE relname = %s AND relkind = 'r' AND relnamespace::regnamespace::text IN ('outbox', 'public')
"""
# The guard of the ledger refuses to delete its rows; pruning deletes those that it has proven to be decided.
_WITHOUT_GUARD: Final = "SET session_replication_role = replica"
# No checkpoint and no autovacuum, so that hardly any record of the WAL has a full page image.
DURABILITY: Final = "fsync on, synchronous_commit off"
_SETTINGS: Final = {"checkpoint_timeout": "1d", "autovacuum": "off", "synchronous_commit": "off"}


def main() -> None:
    if given := child_arguments():
        _, application, broker = given
        json.dump(measure(application, broker), sys.stdout)
        return
    print(f"\nsizing: {MESSAGES:,} messages of {len(BODY)} bytes per path, one per transaction, inbox on")
    found = {path: _of_path(path, servers) for path, servers in {TWO_PHASE: 2, ATOMIC: 1}.items()}
    for path, it in found.items():
        rows = [[name, *(f"{value / MESSAGES:.0f}" for value in values)] for name, values in it["tables"].items()]
        table(BYTES.format(len(BODY), path), ["table", "rows", "indexes", "disk", "WAL of its removal"], rows)
    table(
        WAL, ["path", "database", *PHASES, "whole life"], [row for path, it in found.items() for row in _wal(path, it)]
    )


def _of_path(path: str, servers: int) -> dict[str, Any]:
    """Measure in a process of its own, because Django is configured once per process."""
    with ExitStack() as stack:
        urls = [embedded.create_database(stack.enter_context(server(**_SETTINGS)), "bench") for _ in range(servers)]
        if len(set(urls)) < servers:
            raise SystemExit(f"sizing needs servers of its own: unset {embedded.URL_VARIABLE}.")
        command = [sys.executable, "-m", "benchmarks.sizing", "--child", path, urls[0], urls[-1]]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _wal(path: str, found: Mapping[str, Any]) -> list[list[str]]:
    """One row per database, and one for the sum of two."""
    of_server: dict[str, dict[str, int]] = found["wal"]
    bytes_of = {name: [phases[phase] for phase in PHASES] for name, phases in of_server.items()}
    if len(bytes_of) > 1:
        bytes_of[BOTH] = [sum(values) for values in zip(*bytes_of.values(), strict=True)]
    return [
        [path, name, *(f"{value / MESSAGES:,.0f}" for value in (*values, sum(values)))]
        for name, values in bytes_of.items()
    ]


# -- in the process of one path --------------------------------------------------------------------


def measure(application: str, broker: str) -> dict[str, Any]:
    """Bytes of each table (rows, indexes, both, WAL of its removal), and of WAL by database and phase."""
    configure(application, broker)
    from django.db import transaction

    from benchmarks.shop.models import Effect, Order
    from outbox.contrib.django import publish, subscriber
    from outbox.contrib.django.engine.broker import reset_broker
    from outbox.contrib.django.worker.drain import drain, queue_messages

    @subscriber(TOPIC, group="sizing")
    def handle(delivery: object) -> None:
        Effect.objects.create(number=1)

    body = json.loads(BODY)

    def place(count: int) -> None:
        for _ in range(count):
            with transaction.atomic():
                Order.objects.create(customer="c", total=1, status="new")
                publish(TOPIC, body)
        queue_messages()

    def handle_all() -> None:
        assert drain().handled == MESSAGES

    urls = {name: broker if database == "broker" else application for name, database in DATABASE_OF.items()}
    servers = {APPLICATION: application, BROKER: broker}
    if application == broker:
        # The atomic path needs no ledger.
        del urls["outbox_ledger"]
        servers = {ONE: application}
    with ExitStack() as stack:
        watching = {name: stack.enter_context(psycopg.connect(url, autocommit=True)) for name, url in servers.items()}
        place(1)
        drain()
        before = {name: sizes(url, name) for name, url in urls.items()}
        wal = {
            PHASES[0]: _written(watching, partial(place, MESSAGES)),
            PHASES[1]: _written(watching, handle_all),
        }
        after = {name: sizes(url, name) for name, url in urls.items()}
        reset_broker()
        removed = {name: _written(watching, partial(remove, url, name)) for name, url in urls.items()}
    wal[PHASES[2]] = {name: sum(written[name] for written in removed.values()) for name in watching}
    tables = {}
    for name in urls:
        heap, indexes = (end - begin for begin, end in zip(before[name], after[name], strict=True))
        tables[name] = [heap, indexes, heap + indexes, sum(removed[name].values())]
    return {"tables": tables, "wal": {name: {phase: wal[phase][name] for phase in PHASES} for name in watching}}


def sizes(url: str, name: str) -> tuple[int, int]:
    """Bytes of a table, and of its indexes."""
    with psycopg.connect(url) as connection:
        row = connection.execute(_SIZES, [name]).fetchone()
        assert row is not None, name
        return int(row[0]), int(row[1])


def remove(url: str, name: str) -> None:
    """Delete all rows and vacuum."""
    schema = "outbox." if not name.startswith("outbox_") else ""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(_WITHOUT_GUARD)
        connection.execute(f"DELETE FROM {schema}{name}".encode())
        connection.execute(f"VACUUM (TRUNCATE off) {schema}{name}".encode())


def _written(watching: Mapping[str, psycopg.Connection], work: Callable[[], object]) -> dict[str, int]:
    """Do the work; the bytes of WAL that each database has written meanwhile."""
    before = {name: _position(connection) for name, connection in watching.items()}
    work()
    return {name: _position(connection) - before[name] for name, connection in watching.items()}


def _position(watching: psycopg.Connection) -> int:
    row = watching.execute("SELECT (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint").fetchone()
    assert row is not None
    return int(row[0])


if __name__ == "__main__":
    main()
