"""Space at full speed: sizes of the tables, throughput and WAL while rows live for one minute; bytes per message.

One process publishes in batches, handles the messages with the inbox, and makes ticks. Another process removes rows, as
a worker's own process does: retention and pruning every two seconds. Everything is in one database. The kinds
alternate: rows stay; rows are deleted.
OUTBOX_BENCH_SECONDS sets the length of one run, and OUTBOX_BENCH_KEEP_SECONDS (at least 60) how long rows live.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import psycopg

from benchmarks.harness import REPEATS, Spread, child_arguments, measured, server, table
from outbox.broker import embedded

SECONDS: Final = float(os.environ.get("OUTBOX_BENCH_SECONDS", "180"))
KEEP_SECONDS: Final = int(os.environ.get("OUTBOX_BENCH_KEEP_SECONDS", "60"))
PASS_SECONDS: Final = 2.0
KINDS: Final = ("rows stay", "DELETE")
TABLES: Final = ("commit_log", "op_log", "consume_queue", "outbox_inbox")
_BATCH: Final = 50
# The producer waits when this number of messages is not handled yet.
_AHEAD: Final = 5_000

_SIZES: Final = """
SELECT name, pg_total_relation_size(name::regclass)
FROM unnest(ARRAY['outbox.commit_log', 'outbox.op_log', 'outbox.consume_queue', 'outbox_inbox']) AS name
"""
_VACUUMS: Final = """
SELECT coalesce(sum(autovacuum_count), 0)::bigint, coalesce(sum(n_tup_del), 0)::bigint FROM pg_stat_user_tables
WHERE relname ~ '^(commit_log|op_log|consume_queue|outbox_inbox)'
"""


def main() -> None:
    if given := child_arguments():
        what, *databases = given
        if what == "remove":
            remove(*databases)
        else:
            child(what, *databases)
        return
    print(f"\nspace: {len(KINDS)} kinds, {SECONDS:.0f} s each, {REPEATS} rounds; rows live {KEEP_SECONDS} s")
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    with server(autovacuum_naptime="5s") as url:
        for turn in range(REPEATS):
            for number, kind in enumerate(KINDS):
                database = embedded.create_database(url, f"space_{turn}_{number}")
                command = [sys.executable, "-m", "benchmarks.space", "--child", kind, database, database]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                found[kind].append(json.loads(done.stdout.splitlines()[-1]))
                with psycopg.connect(url, autocommit=True) as connection:
                    connection.execute(f"DROP DATABASE space_{turn}_{number} WITH (FORCE)".encode())
    table(
        "throughput (median, low to high); ratios to 'rows stay' of the same round",
        [
            *("kind", "messages/s", "ratio", "last third against first", "WAL bytes/message", "rows deleted/s"),
            "autovacuums",
        ],
        [
            [
                kind,
                f"{Spread.of([one['rate'] for one in runs])}",
                f"{_ratio(runs, found[KINDS[0]]):.2f}",
                f"{Spread.of([one['thirds'][-1] / one['thirds'][0] for one in runs]):.2f}",
                f"{Spread.of([one['wal'] for one in runs])}",
                f"{Spread.of([one['deleted'] for one in runs])}",
                f"{Spread.of([one['vacuums'] for one in runs])}",
            ]
            for kind, runs in found.items()
        ],
    )
    table(
        "MB of the tables with their indexes, after a third, two thirds and all of the last run",
        ["kind", *TABLES],
        [[kind, *(_sizes_of(runs[-1]["sizes"], name) for name in TABLES)] for kind, runs in found.items()],
    )
    stays = found[KINDS[0]][-1]
    table(
        "bytes per message (rows that were never removed)",
        [*TABLES],
        [[f"{stays['sizes'][-1][name] / stays['messages']:,.0f}" for name in TABLES]],
    )


def _ratio(runs: list[dict[str, Any]], first: list[dict[str, Any]]) -> Spread:
    return Spread.of([a["rate"] / b["rate"] for a, b in zip(runs, first, strict=True)])


def _sizes_of(sizes: list[dict[str, int]], name: str) -> str:
    return " → ".join(f"{one[name] / 1e6:,.0f}" for one in sizes)


def child(kind: str, application: str, broker: str) -> None:
    _configure(application, broker)
    from django.db import connection

    from benchmarks.django_setup import TOPIC
    from outbox.broker.consumer.runtime import tune_garbage_collector
    from outbox.contrib.django import subscriber
    from outbox.contrib.django.engine.broker import get_broker
    from outbox.contrib.django.worker.workers import consumer_runtime
    from outbox.message import Delivery, Message

    handled = [0]

    @subscriber(TOPIC, group="bench")
    def one(delivery: Delivery) -> None:
        handled[0] += 1

    if kind != KINDS[0]:
        # The leader runs retention, too.
        with psycopg.connect(broker, autocommit=True) as database:
            database.execute("UPDATE outbox.topic SET retention_seconds = %s", [KEEP_SECONDS])
    connection.close()
    tune_garbage_collector()
    stop = threading.Event()
    body = json.dumps({"order_id": 1, "note": "x" * 230}).encode()
    sent = [0]

    def publish() -> None:
        while not stop.is_set():
            if sent[0] - handled[0] > _AHEAD:
                time.sleep(0.01)
                continue
            get_broker().send([Message(topic=TOPIC, body=body) for _ in range(_BATCH)])
            sent[0] += _BATCH

    works: list[Callable[[], None]] = [publish, lambda: consumer_runtime(leads=True).run(stop)]
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    with _removing(application, broker) if kind != KINDS[0] else contextlib.nullcontext():
        # The first seconds warm up.
        time.sleep(min(10.0, SECONDS / 6))
        sizes: list[Mapping[str, int]] = []
        thirds: list[int] = []
        started, before = time.perf_counter(), handled[0]
        with measured(broker) as usage, psycopg.connect(broker, autocommit=True) as database:
            for _ in range(3):
                first = handled[0]
                time.sleep(SECONDS / 3)
                thirds.append(handled[0] - first)
                rows = database.execute(_SIZES).fetchall()
                sizes.append({name.rpartition(".")[2]: size for name, size in rows})
            messages = handled[0] - before
            seconds = time.perf_counter() - started
    stop.set()
    for thread in threads:
        thread.join(30)
    # The statistics of a session arrive when it ends, or a second later.
    time.sleep(2)
    with psycopg.connect(broker, autocommit=True) as database:
        vacuums, deleted = database.execute(_VACUUMS).fetchone() or (0, 0)
    print(
        json.dumps(
            {
                "rate": messages / seconds,
                "thirds": thirds,
                "wal": usage().wal_bytes / messages,
                "sizes": sizes,
                "messages": handled[0],
                "vacuums": vacuums,
                "deleted": deleted / seconds,
            }
        )
    )


@contextlib.contextmanager
def _removing(application: str, broker: str) -> Iterator[None]:
    """A process that removes rows during the block."""
    command = [sys.executable, "-m", "benchmarks.space", "--child", "remove", application, broker]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as running:
        yield
        running.communicate()


def remove(application: str, broker: str) -> None:
    """Remove old rows every two seconds until standard input ends."""
    _configure(application, broker)
    from outbox.contrib.django.ledger import pruning

    stop = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=wait, daemon=True).start()
    while not stop.wait(PASS_SECONDS):
        _clear(broker)
        pruning.prune_inboxes(older_than=datetime.now(UTC) - timedelta(seconds=KEEP_SECONDS))


def _configure(application: str, broker: str) -> None:
    from benchmarks.django_setup import configure

    configure(application, broker)
    import django.conf

    django.conf.settings.OUTBOX = {**django.conf.settings.OUTBOX, "INBOX_RETENTION_SECONDS": KEEP_SECONDS}


def _clear(broker: str) -> None:
    from outbox.broker.database.executor import Executor
    from outbox.broker.maintenance import retention

    with psycopg.connect(broker, autocommit=True) as connection:
        while retention.run_once(Executor(connection, "outbox")).more:
            pass


if __name__ == "__main__":
    main()
