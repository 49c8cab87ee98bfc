"""The bulk path: batches are sent, sequenced and drained by a batch handler (part `bulk` of benchmarks/goals.py).

Every role is a process of its own, as in production. Each measurement returns messages per second. The peer in the same
round is what the machine can: psycopg inserts the same bodies in batches of the same size into a bare table, and
deletes them again.
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
_TABLE = "CREATE TABLE queue (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body bytea)"


def raw_insert_then_delete(url: str) -> float:
    """The ceiling: only bodies, claimed by deleting."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(_TABLE)
        started = time.perf_counter()
        fill(connection)
        claim_all(connection)
        return MESSAGES / (time.perf_counter() - started)


def fill(connection: psycopg.Connection) -> None:
    for _ in range(MESSAGES // BATCH):
        connection.execute("INSERT INTO queue (body) SELECT unnest(%s::bytea[])", [[BODY] * BATCH], binary=True)


def claim_by(processes: int) -> Callable[[str], float]:
    """From the first claim until the last process has found nothing more; what the cores can."""

    def measure(url: str) -> float:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(_TABLE)
            fill(connection)
        with contextlib.ExitStack() as stack:
            claiming = [stack.enter_context(_claiming(url)) for _ in range(processes)]
            started = time.perf_counter()
            for one in claiming:
                assert one.stdin is not None
                one.stdin.write("go\n")
                one.stdin.flush()
            for one in claiming:
                assert one.stdout is not None
                assert one.stdout.readline() == "done\n"
            seconds = time.perf_counter() - started
        return MESSAGES / seconds

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


def send_decided(broker: PostgresBroker) -> None:
    for batch in batches(PLAIN):
        broker.send(batch)


def send_two_phase(broker: PostgresBroker) -> None:
    """Halves one batch at a time, ends as the flusher sends them: many in one statement."""
    ends: list[EndTransaction] = []
    for batch in batches(FIFO):
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


def wait_for(url: str, query: str, expected: int) -> None:
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


# How many queues the worker with the fewest has, once so many share them.
_SHARED = """
SELECT min(queues) FROM (
    SELECT count(*) AS queues, count(*) OVER () AS owners
    FROM outbox.queue_lease WHERE expires_at > now() GROUP BY owner
) AS of_owner HAVING max(owners) = {workers}
"""


def drain_joined(workers: int) -> Callable[[str], float]:
    """From the moment that the log is there to the last stored offset, by workers that have their queues already.

    They join while nothing is queued, and are stopped while the sequencer queues it all.
    """

    def measure(url: str) -> float:
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
                wait_for(url, QUEUED, MESSAGES)
            started = time.perf_counter()
            _signal(consumers, signal.SIGCONT)
            wait_for(url, HANDLED, MESSAGES)
            seconds = time.perf_counter() - started
        return MESSAGES / seconds

    return measure


def _signal(processes: Sequence[subprocess.Popen[str]], number: signal.Signals) -> None:
    for running in processes:
        running.send_signal(number)


def end_to_end(url: str) -> float:
    """Half messages and end messages of a FIFO topic, until the last offset is stored."""
    broker = prepared(url)
    with process("outbox.broker", url), process("benchmarks.bulk_consumer", url, "--topic", FIFO) as consumer:
        assert consumer.stdout is not None
        assert consumer.stdout.readline() == "ready\n"
        started = time.perf_counter()
        send_two_phase(broker)
        wait_for(url, HANDLED, MESSAGES)
        seconds = time.perf_counter() - started
    broker.close()
    return MESSAGES / seconds


# The rows of so many processes.
CLAIM, DRAIN = "raw claim-delete, processes: {}", "drain, workers that have joined: {}"
FIFO_ROW = "end to end, two-phase, FIFO"
RAW_ROW = "raw psycopg insert + claim-delete"
