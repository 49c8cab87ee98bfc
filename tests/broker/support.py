"""Shared helpers of the broker's tests."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
from psycopg.pq import Trace

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.leading import LeaderSettings, Sequencer, TickCounts
from outbox.broker.process import run_broker
from outbox.message import Message
from outbox.topic import MessageType, Topic
from outbox.transaction import Decision, EndTransaction, HalfTransaction

ANY = frozenset({MessageType.NORMAL, MessageType.DELAY, MessageType.TRANSACTION})
FIFO = frozenset({MessageType.FIFO, MessageType.DELAY, MessageType.TRANSACTION})
TOPICS = (
    Topic(name="orders", types=ANY, queue_count=4),
    Topic(name="ordered", types=FIFO, queue_count=2),
    Topic(name="released", types=FIFO, queue_count=1, on_park="release"),
    Topic(name="plain", types=frozenset({MessageType.NORMAL})),
)
GROUP = "shop"


def message(
    topic: str = "orders", *, key: str = "", body: bytes = b"{}", deliver_at: datetime | None = None
) -> Message:
    """A message with a new id."""
    return Message(topic=topic, body=body, key=key, deliver_at=deliver_at)


def half(*messages: Message, immunity_seconds: int | None = None, group: str = GROUP) -> HalfTransaction:
    """A half transaction of the messages, or of one new message."""
    return HalfTransaction(producer_group=group, messages=messages or (message(),), immunity_seconds=immunity_seconds)


def end(transaction_id: UUID, decision: Decision = Decision.COMMIT, *, group: str = GROUP) -> EndTransaction:
    """An end message."""
    return EndTransaction(transaction_id=transaction_id, decision=decision, producer_group=group)


def let_time_pass(connection: psycopg.Connection[tuple[Any, ...]], seconds: float) -> None:
    """Make what check-back knows, and what is scheduled, so much older on the broker's clock."""
    interval = {"t": timedelta(seconds=seconds)}
    connection.execute(
        "UPDATE outbox.commit_log SET stored_at = stored_at - %(t)s, deliver_at = deliver_at - %(t)s", interval
    )
    connection.execute(
        "UPDATE outbox.pending_check SET stored_at = stored_at - %(t)s, due_at = due_at - %(t)s,"
        " immune_until = immune_until - %(t)s, asked_at = asked_at - %(t)s, parked_at = parked_at - %(t)s",
        interval,
    )
    connection.execute("UPDATE outbox.scheduled SET due_at = due_at - %(t)s", interval)
    connection.execute("UPDATE outbox.producer_group SET seen_at = seen_at - %(t)s", interval)


def drain(sequencer: Sequencer, connection: BrokerConnection) -> TickCounts:
    """Tick until there is no backlog; the counts of the last tick."""
    while True:
        counts = sequencer.run_once(connection)
        if not counts.more:
            return counts


def new_sequencer(
    database: BrokerDatabase, *, batch: int = 20_000, clock: Callable[[], float] = time.monotonic
) -> Sequencer:
    """A sequencer of its own owner."""
    return Sequencer(database, uuid4(), batch=batch, clock=clock)


@dataclass(frozen=True)
class Queued:
    """A queue entry with the id of its message."""

    queue_id: int
    offset: int
    message_id: UUID
    topic: str
    key: str
    body: bytes


def queued(connection: psycopg.Connection[tuple[Any, ...]], topic: str | None = None) -> list[Queued]:
    """All queue entries, by queue and offset."""
    rows = connection.execute(
        "SELECT queue_id, queue_offset, message_id, name, key, body FROM outbox.consume_queue"
        " JOIN outbox.commit_log USING (log_id) JOIN outbox.topic USING (topic_id)"
        " WHERE %(topic)s::text IS NULL OR name = %(topic)s ORDER BY queue_id, queue_offset",
        {"topic": topic},
    )
    return [Queued(*row) for row in rows]


def queued_ids(connection: psycopg.Connection[tuple[Any, ...]], topic: str | None = None) -> list[UUID]:
    """The message ids of all queue entries."""
    return [entry.message_id for entry in queued(connection, topic)]


def another_consumer(connection: psycopg.Connection[tuple[Any, ...]], *, lives_seconds: float = 600.0) -> None:
    """Another consumer process of the broker, which has to learn of new entries."""
    connection.execute(
        """
        WITH registered AS (
            INSERT INTO outbox.consumer_group (name) VALUES ('another' || gen_random_uuid()) RETURNING group_id
        )
        INSERT INTO outbox.consumer (instance_id, group_id, topics, host, pid, expires_at)
        SELECT gen_random_uuid(), group_id, '{}', 'here', 1, now() + make_interval(secs => %s) FROM registered
        """,
        [lives_seconds],
    )


def assert_gapless(connection: psycopg.Connection[tuple[Any, ...]]) -> None:
    """Every queue's offsets are 0, 1, 2, … without a gap."""
    rows = connection.execute(
        "SELECT queue_id, count(*), min(queue_offset), max(queue_offset) FROM outbox.consume_queue GROUP BY queue_id"
    ).fetchall()
    for queue_id, count, first, last in rows:
        assert (first, last) == (0, count - 1), f"queue {queue_id} has {count} entries from {first} to {last}"


@contextlib.contextmanager
def process(database: BrokerDatabase, settings: LeaderSettings | None = None) -> Iterator[threading.Thread]:
    """The broker process as a thread of this one."""
    stop = threading.Event()
    thread = threading.Thread(target=run_broker, args=(database, stop), kwargs={"settings": settings})
    thread.start()
    try:
        yield thread
    finally:
        stop.set()
        thread.join(timeout=30)
        assert not thread.is_alive()


@dataclass
class Wire:
    """The messages that libpq sent on a connection."""

    lines: list[str] = field(default_factory=list)

    @property
    def round_trips(self) -> int:
        """How often the client waited for the server (one Sync or simple Query each)."""
        return sum(line.startswith("F") and line.split("\t")[2] in ("Sync", "Query") for line in self.lines)

    @property
    def statements(self) -> int:
        """Statements executed."""
        return sum(line.startswith("F") and line.split("\t")[2] in ("Execute", "Query") for line in self.lines)


@contextlib.contextmanager
def wire(connection: psycopg.Connection[tuple[Any, ...]]) -> Iterator[Wire]:
    """Record the protocol messages of a connection."""
    recorded = Wire()
    with tempfile.TemporaryFile("w+") as file:
        connection.pgconn.trace(file.fileno())
        connection.pgconn.set_trace_flags(Trace.SUPPRESS_TIMESTAMPS)
        try:
            yield recorded
        finally:
            connection.pgconn.untrace()
            file.seek(0)
            recorded.lines = [line for line in file.read().splitlines() if line.count("\t") >= 2]


def in_threads(works: Sequence[Callable[[], object]]) -> list[object]:
    """Run all at once; their results. The first exception is raised after all have ended."""
    results: list[object] = [None] * len(works)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = works[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    if errors:
        raise errors[0]
    return results
