"""Pruning of ledger and inbox beside publishing traffic: rows per second, WAL per row, and the traffic's loss.

Both tables hold rows that are past their retention, and in front of them rows of the same age that have to stay. The
passes are those of a worker: bounded turns, one after the other. `OUTBOX_BENCH_ROWS` sets how many rows go.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

from benchmarks.harness import REPEATS, Spread, child_arguments, measured, server, table
from outbox.broker import embedded

ROWS = int(os.environ.get("OUTBOX_BENCH_ROWS", "500000"))
STAY = ROWS // 10
TRAFFIC_SECONDS = 5.0

# Ids in the order of time, as UUID version 7 makes them.
_IDS = """
SELECT n, (lpad(to_hex(%(began)s + n / 50), 12, '0') || '7000' || '8' || lpad(to_hex(n), 15, '0'))::uuid AS id
FROM generate_series(1, %(rows)s) AS n
"""
_LEDGER = f"INSERT INTO outbox_ledger (transaction_id, state) SELECT id, 'C' FROM ({_IDS}) AS given"
_DECISIONS = f"""
INSERT INTO outbox.op_log (transaction_id, decision, decided_by, log_ids)
SELECT id, 'C', 'P', ARRAY[n] FROM ({_IDS}) AS given
"""
# The first of them are still in the log, and their group is known.
_INBOX = f"""
INSERT INTO outbox_inbox (consumer_group, generation, message_id, handled_at)
SELECT 'bench', 1, id, to_timestamp((%(began)s + n / 50) / 1000.0) FROM ({_IDS}) AS given
"""
_STAYING = f"""
INSERT INTO outbox.commit_log (born_at, transaction_id, message_id, topic_id, half, key, tag, content_type, body)
SELECT now(), id, id, (SELECT min(topic_id) FROM outbox.topic), false, '', '', 'application/json', '{{}}'
FROM ({_IDS}) AS given WHERE n <= %(stay)s
"""
_GROUP = "INSERT INTO outbox.consumer_group (name) VALUES ('bench')"


@dataclass(frozen=True)
class Result:
    """Rows per second of both tables, WAL bytes per row, and messages per second without pruning and during it."""

    ledger: float
    inbox: float
    wal_bytes: float
    alone: float
    beside: float


def main() -> None:
    if given := child_arguments():
        child(*given)
        return
    print(f"\npruning: {ROWS:,} rows of the ledger, {ROWS - STAY:,} of {ROWS:,} of the inbox, {REPEATS} runs")
    rows = []
    with server() as url:
        for path in ("atomic", "two-phase"):
            found = [measure(url, f"pruning_{path[:3]}_{run}", path) for run in range(REPEATS)]
            rows.append(
                [
                    path,
                    f"{Spread.of([one.ledger for one in found])}",
                    f"{Spread.of([one.inbox for one in found])}",
                    f"{Spread.of([one.wal_bytes for one in found])}",
                    f"{Spread.of([one.alone for one in found])}",
                    f"{Spread.of([one.beside for one in found])}",
                ]
            )
    table(
        "beside one publishing thread (median, low to high)",
        ["path", "ledger rows/s", "inbox rows/s", "WAL bytes/row", "messages/s alone", "messages/s beside it"],
        rows,
    )


def measure(url: str, name: str, path: str) -> Result:
    """One run, in a process of its own."""
    application = embedded.create_database(url, name)
    broker = application if path == "atomic" else embedded.create_database(url, f"{name}_broker")
    command = [sys.executable, "-m", "benchmarks.pruning", "--child", path, application, broker]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Result(*map(float, done.stdout.split()))


def child(path: str, application: str, broker: str) -> None:
    import psycopg

    from benchmarks.django_setup import configure

    configure(application, broker)

    values = {"rows": ROWS, "stay": STAY, "began": round((time.time() - 20 * 24 * 3600) * 1000)}
    with psycopg.connect(broker, autocommit=True) as connection:
        connection.execute("SET synchronous_commit TO off")
        for statement in (_DECISIONS, _STAYING, _GROUP):
            psycopg.ClientCursor(connection).execute(statement.encode(), values)
        connection.execute("VACUUM ANALYZE")
    with psycopg.connect(application, autocommit=True) as connection:
        connection.execute("SET synchronous_commit TO off")
        for statement in (_LEDGER, _INBOX):
            psycopg.ClientCursor(connection).execute(statement.encode(), values)
        connection.execute("VACUUM ANALYZE")
    with Traffic() as traffic:
        time.sleep(TRAFFIC_SECONDS)
        alone = traffic.rate()
        # WAL of the traffic is in it: a few hundred messages per thousand rows would be many.
        with measured(application) as usage:
            ledger, inbox = pruned()
        beside = traffic.rate()
    print(ledger, inbox, usage().wal_bytes / (2 * ROWS - STAY), alone, beside)


def pruned() -> tuple[float, float]:
    """Rows per second of the ledger and of the inbox, worked off in turns as by a worker."""
    from datetime import UTC, datetime, timedelta

    from outbox.contrib.django.ledger.pruning import prune_inboxes, prune_ledgers
    from outbox.contrib.django.worker.periodic import PRUNE_TURN_SECONDS

    rates = []
    for prune, expected in ((prune_ledgers, ROWS), (prune_inboxes, ROWS - STAY)):
        started, removed, more = time.perf_counter(), 0, True
        older_than = datetime.now(UTC) - timedelta(days=14)
        while more:
            counts = prune(older_than=older_than, max_seconds=PRUNE_TURN_SECONDS / 2)
            removed, more = removed + counts.ledger + counts.inbox, counts.more
        assert removed == expected, f"{removed} rows went, not {expected}"
        rates.append(removed / (time.perf_counter() - started))
    return rates[0], rates[1]


class Traffic:
    """One thread that places orders, each with a message, until the end of the block."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._count = 0
        self._since = time.perf_counter()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def rate(self) -> float:
        """Messages per second since the last call."""
        count, since = self._count, self._since
        self._count, self._since = 0, time.perf_counter()
        return count / (self._since - since)

    def _run(self) -> None:
        from django.db import transaction

        from benchmarks.django_setup import TOPIC
        from benchmarks.shop.models import Order
        from outbox.contrib.django import publish

        while not self._stop.is_set():
            with transaction.atomic():
                order = Order.objects.create(customer="customer", total="129.90", status="paid")
                publish(TOPIC, {"order_id": order.pk, "total": "129.90", "note": "x" * 200}, key=str(order.pk))
            self._count += 1


if __name__ == "__main__":
    main()
