"""Bulk path: send batches, sequence, drain with a batch handler; alone and all at once.

Every role is a process of its own, as in production. The peer in the same run is the raw ceiling: psycopg
inserting the same bodies in batches of the same size into a bare table, and deleting them again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import psycopg

from benchmarks.claiming import BATCH, claim_all
from benchmarks.harness import REPEATS, Spread, Usage, measured, server, table
from outbox.broker import embedded
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.postgres import PostgresBroker
from outbox.broker.schema.install import install
from outbox.message import Message
from outbox.topic import MessageType, Topic
from outbox.transaction import Decision, EndTransaction, HalfTransaction

MESSAGES = int(os.environ.get("OUTBOX_BENCH_MESSAGES", "100000"))
BODY = (
    b'{"order_id": 1234567, "customer": "customer-0001234", "total": "129.90", "currency": "EUR", "lines": ['
    + b", ".join(b'{"sku": "sku-%04d", "n": 1}' % n for n in range(5))
    + b'], "paid_at": "2026-01-01T00:00:00+00:00"}'
)
PLAIN, FIFO = "bulk", "bulk-fifo"
GROUP = "bench"
_TABLE = "CREATE TABLE queue (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body bytea)"


def main() -> None:
    assert 230 <= len(BODY) <= 290, len(BODY)
    print(f"\nbulk: {MESSAGES:,} messages of {len(BODY)} bytes in batches of {BATCH}, {REPEATS} runs")
    rows: dict[str, list[tuple[float, Usage]]] = {}
    with server() as url:
        for run in range(REPEATS):
            for number, (name, measure) in enumerate(MEASURES.items()):
                database = embedded.create_database(url, f"bulk_{run}_{number}")
                rows.setdefault(name, []).append(measure(database))
    table(
        "bulk path",
        ["what (median, low to high)", "messages/s", "commits/message", "WAL bytes/message"],
        [
            [
                name,
                f"{Spread.of([rate for rate, _ in results])}",
                f"{Spread.of([usage.commits / MESSAGES for _, usage in results]):.4f}",
                f"{Spread.of([usage.wal_bytes / MESSAGES for _, usage in results])}",
            ]
            for name, results in rows.items()
        ],
    )
    ratios(rows)


def ratios(rows: dict[str, list[tuple[float, Usage]]]) -> None:
    """Draining by several workers beside several processes that claim from a bare table: what the cores can."""
    table(
        "draining by more workers, against one of the same round",
        ["workers or processes", "workers", "raw claim-delete"],
        [[str(count), *(f"{_against_one(rows, kind, count):.2f}" for kind in (DRAIN, CLAIM))] for count in (2, 4)],
    )


def _against_one(rows: dict[str, list[tuple[float, Usage]]], kind: str, count: int) -> Spread:
    one, more = rows[kind.format(1)], rows[kind.format(count)]
    return Spread.of([b / a for (a, _), (b, _) in zip(one, more, strict=True)])


def raw_insert_then_delete(url: str) -> tuple[float, Usage]:
    """The ceiling: only bodies, claimed by deleting."""
    with psycopg.connect(url, autocommit=True) as connection, measured(url) as usage:
        connection.execute(_TABLE)
        started = time.perf_counter()
        fill(connection)
        claim_all(connection)
        seconds = time.perf_counter() - started
    return MESSAGES / seconds, usage()


def fill(connection: psycopg.Connection) -> None:
    for _ in range(MESSAGES // BATCH):
        connection.execute("INSERT INTO queue (body) SELECT unnest(%s::bytea[])", [[BODY] * BATCH], binary=True)


def claim_by(processes: int) -> Callable[[str], tuple[float, Usage]]:
    """From the first claim until the last process has found nothing more; what the cores can."""

    def measure(url: str) -> tuple[float, Usage]:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(_TABLE)
            fill(connection)
        with contextlib.ExitStack() as stack:
            claiming = [stack.enter_context(_claiming(url)) for _ in range(processes)]
            usage = stack.enter_context(measured(url))
            started = time.perf_counter()
            for one in claiming:
                assert one.stdin is not None
                one.stdin.write("go\n")
                one.stdin.flush()
            for one in claiming:
                assert one.stdout is not None
                assert one.stdout.readline() == "done\n"
            seconds = time.perf_counter() - started
        return MESSAGES / seconds, usage()

    return measure


def _claiming(url: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.claiming", "--database", url]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def prepared(url: str) -> PostgresBroker:
    with psycopg.connect(url, autocommit=True) as connection:
        install(connection)
    broker = PostgresBroker(BrokerDatabase(conninfo=url))
    types = frozenset({MessageType.NORMAL, MessageType.TRANSACTION})
    broker.declare([Topic(name=PLAIN, types=types), Topic(name=FIFO, types=types | {MessageType.FIFO})])
    return broker


def batches(topic: str) -> Iterator[list[Message]]:
    for start in range(0, MESSAGES, BATCH):
        yield [
            Message(topic=topic, body=BODY, key=f"key-{number % 1000}" if topic == FIFO else "")
            for number in range(start, start + BATCH)
        ]


def send_decided(broker: PostgresBroker, topic: str = PLAIN) -> None:
    for batch in batches(topic):
        broker.send(batch)


def send_two_phase(broker: PostgresBroker, topic: str = PLAIN) -> None:
    """Halves one batch at a time, ends as the flusher sends them: many in one statement."""
    ends: list[EndTransaction] = []
    for batch in batches(topic):
        half = HalfTransaction(producer_group="bench", messages=batch)
        broker.send_half(half)
        ends.append(
            EndTransaction(transaction_id=half.transaction_id, decision=Decision.COMMIT, producer_group="bench")
        )
        if len(ends) == 10:
            broker.end(ends)
            ends.clear()
    if ends:
        broker.end(ends)


def sending(send: Callable[[PostgresBroker], None]) -> Callable[[str], tuple[float, Usage]]:
    def measure(url: str) -> tuple[float, Usage]:
        broker = prepared(url)
        with measured(url) as usage:
            started = time.perf_counter()
            send(broker)
            seconds = time.perf_counter() - started
        broker.close()
        return MESSAGES / seconds, usage()

    return measure


@contextlib.contextmanager
def process(module: str, url: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process of the broker's, stopped by SIGTERM at the end."""
    command = [sys.executable, "-m", module, "--database", url, *arguments]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield running
    finally:
        running.terminate()
        running.communicate()


def wait_for(url: str, query: str, expected: int = MESSAGES) -> None:
    deadline = time.monotonic() + 300
    with psycopg.connect(url, autocommit=True) as connection:
        while True:
            row = connection.execute(query.encode()).fetchone()
            if row is not None and (row[0] or 0) >= expected:
                return
            if time.monotonic() > deadline:
                raise SystemExit(f"bulk: {query!r} did not reach {expected}, it is {row}")
            time.sleep(0.005)


QUEUED = "SELECT sum(appended) FROM outbox.tick"
HANDLED = "SELECT sum(handled) FROM outbox.offset_v1"


def sequence_alone(url: str) -> tuple[float, Usage]:
    broker = prepared(url)
    send_decided(broker)
    broker.close()
    with measured(url) as usage:
        started = time.perf_counter()
        with process("outbox.broker", url):
            wait_for(url, QUEUED)
            seconds = time.perf_counter() - started
    return MESSAGES / seconds, usage()


def drain_alone(url: str, topic: str = PLAIN, *options: str) -> tuple[float, Usage]:
    """From the first fetch to the last stored offset; the process is up before the clock starts.

    `options` go to the consumer process.
    """
    broker = prepared(url)
    send_decided(broker, topic)
    broker.close()
    with process("outbox.broker", url):
        wait_for(url, QUEUED)
    consuming = process("benchmarks.bulk_consumer", url, "--topic", topic, "--wait", *options)
    with consuming as consumer, measured(url) as usage:
        assert consumer.stdout is not None
        assert consumer.stdout.readline() == "ready\n"
        started = time.perf_counter()
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("NOTIFY bench_go")
        wait_for(url, HANDLED)
        seconds = time.perf_counter() - started
    return MESSAGES / seconds, usage()


# How many queues the worker with the fewest has, once so many share them.
_SHARED = """
SELECT min(queues) FROM (
    SELECT count(*) AS queues, count(*) OVER () AS owners
    FROM outbox.queue_lease WHERE expires_at > now() GROUP BY owner
) AS of_owner HAVING max(owners) = {workers}
"""


def drain_joined(workers: int) -> Callable[[str], tuple[float, Usage]]:
    """From the moment that the log is there to the last stored offset, by workers that have their queues already.

    They join while nothing is queued, and are stopped while the sequencer queues it all.
    """

    def measure(url: str) -> tuple[float, Usage]:
        broker = prepared(url)
        send_decided(broker)
        broker.close()
        with contextlib.ExitStack() as stack:
            consumers = [
                stack.enter_context(process("benchmarks.bulk_consumer", url, "--topic", PLAIN)) for _ in range(workers)
            ]
            wait_for(url, _SHARED.format(workers=workers), Topic(name=PLAIN).queue_count // workers)
            # A process that is ended while it is stopped would end when it continues.
            stack.callback(_signal, consumers, signal.SIGCONT)
            _signal(consumers, signal.SIGSTOP)
            with process("outbox.broker", url):
                wait_for(url, QUEUED)
            usage = stack.enter_context(measured(url))
            started = time.perf_counter()
            _signal(consumers, signal.SIGCONT)
            wait_for(url, HANDLED)
            seconds = time.perf_counter() - started
        return MESSAGES / seconds, usage()

    return measure


def _signal(processes: Sequence[subprocess.Popen[str]], number: signal.Signals) -> None:
    for running in processes:
        running.send_signal(number)


def all_at_once(send: Callable[[PostgresBroker, str], None], topic: str) -> Callable[[str], tuple[float, Usage]]:
    def measure(url: str) -> tuple[float, Usage]:
        broker = prepared(url)
        with process("outbox.broker", url), process("benchmarks.bulk_consumer", url, "--topic", topic) as consumer:
            assert consumer.stdout is not None
            assert consumer.stdout.readline() == "ready\n"
            with measured(url) as usage:
                started = time.perf_counter()
                send(broker, topic)
                wait_for(url, HANDLED)
                seconds = time.perf_counter() - started
        broker.close()
        return MESSAGES / seconds, usage()

    return measure


# The rows of so many processes.
CLAIM, DRAIN = "raw claim-delete, processes: {}", "drain, workers that have joined: {}"
FIFO_ROW = "end to end, two-phase, FIFO"
RAW_ROW = "raw psycopg insert + claim-delete"
MEASURES: dict[str, Callable[[str], tuple[float, Usage]]] = {
    RAW_ROW: raw_insert_then_delete,
    "send, decided": sending(send_decided),
    "send, two-phase": sending(send_two_phase),
    "sequence alone": sequence_alone,
    "drain alone, one worker": drain_alone,
    **{CLAIM.format(count): claim_by(count) for count in (1, 2, 4)},
    **{DRAIN.format(count): drain_joined(count) for count in (1, 2, 4)},
    "end to end, decided": all_at_once(send_decided, PLAIN),
    "end to end, two-phase": all_at_once(send_two_phase, PLAIN),
    FIFO_ROW: all_at_once(send_two_phase, FIFO),
}


if __name__ == "__main__":
    main()
