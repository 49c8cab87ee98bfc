"""The CPU of one tick, of the leader and its backend, while many other rows are stored, wait, or cannot be vacuumed.

Each case has a database of its own; rounds go over all of them, so that ratios to the first are of one machine at one
time. A tick takes one message, published before it; `idle` ones take none. OUTBOX_BENCH_SIZES: log rows.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from uuid import uuid4

import psycopg

from benchmarks.harness import Spread, server, table
from outbox.broker import embedded
from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.log import commit_log
from outbox.broker.log.topics import TopicCatalog, declare_topics
from outbox.broker.schema.install import install
from outbox.broker.sequencer.sequencer import Sequencer
from outbox.message import Message
from outbox.topic import MessageType, Topic
from outbox.transaction import HalfTransaction

SIZES = tuple(int(size) for size in os.environ.get("OUTBOX_BENCH_SIZES", "10000 300000").split())
ROUNDS = int(os.environ.get("OUTBOX_BENCH_ROUNDS", "9"))
TICKS = 200
KEYS = 10_000
# Retries and delayed messages that came and went while a transaction was held open elsewhere.
PASSED = 30_000
_TYPES = frozenset({MessageType.NORMAL, MessageType.DELAY, MessageType.TRANSACTION})
_FIFO = frozenset({MessageType.FIFO, MessageType.TRANSACTION})


@dataclass
class Case:
    """A broker in some state, and the milliseconds of CPU of a tick, per round."""

    name: str
    database: BrokerDatabase
    topic: str
    connection: BrokerConnection
    publishing: BrokerConnection
    sequencer: Sequencer
    catalog: TopicCatalog = field(default_factory=TopicCatalog)
    taken: dict[str, list[float]] = field(default_factory=lambda: {"busy": [], "idle": []})
    numbers: Iterator[int] = field(default_factory=count)

    def publish(self, messages: Sequence[Message]) -> None:
        run = Executor(self.publishing, self.database.schema)
        for start in range(0, len(messages), 5000):
            commit_log.append_decided(run, self.catalog, messages[start : start + 5000])

    def drain(self) -> None:
        while self.sequencer.run_once(self.connection).more:
            pass

    def measure(self) -> None:
        """One round of busy ticks, one of idle ones."""
        for kind, taken in self.taken.items():
            spent = 0
            for _ in range(TICKS):
                if kind == "busy":
                    self.publish([Message(topic=self.topic, key=f"new{next(self.numbers)}", body=b"{}")])
                before = self._cpu_ns()
                self.sequencer.run_once(self.connection)
                spent += self._cpu_ns() - before
            taken.append(spent / TICKS / 1e6)

    def _cpu_ns(self) -> int:
        backend = Path(f"/proc/{self.connection.info.backend_pid}/schedstat").read_text().split()[0]
        return time.thread_time_ns() + int(backend)


def main() -> None:
    with server(autovacuum="on") as url, contextlib.ExitStack() as stack:
        cases = [
            _case(stack, url, "nothing else", _nothing),
            *(_case(stack, url, f"{size:,} log rows", _log_of(size)) for size in SIZES),
            _case(stack, url, "200 topics, 1,600 queues", _topics(200, 8)),
            _case(stack, url, "200 topics, 4,800 queues", _topics(200, 24)),
            _case(stack, url, "FIFO message, nothing else", _nothing, topic="ordered"),
            _case(stack, url, f"{KEYS:,} held keys", _held),
            _case(stack, url, f"{KEYS:,} held keys, FIFO message", _held, topic="ordered"),
            _case(stack, url, f"{KEYS:,} open FIFO halves", _open),
            _case(stack, url, f"{PASSED:,} retries passed, snapshot held", _passed),
        ]
        for _ in range(ROUNDS):
            for case in cases:
                case.measure()
        first = cases[0]
        ordered = next(case for case in cases if case.topic == "ordered")
        for kind in ("busy", "idle"):
            rows = []
            for case in cases:
                base = ordered if case.topic == "ordered" else first
                ratios = [one / other for one, other in zip(case.taken[kind], base.taken[kind], strict=True)]
                rows.append([case.name, f"{Spread.of(case.taken[kind]):.2f}", f"{Spread.of(ratios):.2f}"])
            table(f"One {kind} tick, ms of CPU", ["beside", "median (low to high)", "ratio"], rows)


def _case(
    stack: contextlib.ExitStack,
    url: str,
    name: str,
    fill: Callable[[contextlib.ExitStack, Case], None],
    *,
    topic: str = "topic-0",
) -> Case:
    database = BrokerDatabase(embedded.create_database(url, f"case_{uuid4().hex}"))
    connection = stack.enter_context(contextlib.closing(database.open()))
    install(connection)
    topics = [Topic(name="topic-0", types=_TYPES), Topic(name="ordered", types=_FIFO)]
    declare_topics(Executor(connection, database.schema), topics)
    publishing = stack.enter_context(contextlib.closing(database.open()))
    case = Case(name, database, topic, connection, publishing, Sequencer(database, uuid4()))
    fill(stack, case)
    case.drain()
    case.measure()
    for taken in case.taken.values():
        taken.clear()
    return case


def _nothing(stack: contextlib.ExitStack, case: Case) -> None:
    del stack, case


def _log_of(size: int) -> Callable[[contextlib.ExitStack, Case], None]:
    def fill(stack: contextlib.ExitStack, case: Case) -> None:
        del stack
        case.publish([Message(topic="topic-0", body=b"{}") for _ in range(size)])

    return fill


def _topics(number: int, queues: int) -> Callable[[contextlib.ExitStack, Case], None]:
    def fill(stack: contextlib.ExitStack, case: Case) -> None:
        del stack
        topics = [Topic(name=f"other-{n}", types=_TYPES, queue_count=queues) for n in range(1, number)]
        declare_topics(Executor(case.publishing, case.database.schema), topics)
        case.publish([Message(topic=topic.name, body=b"{}") for topic in topics for _ in range(queues)])

    return fill


def _open(stack: contextlib.ExitStack, case: Case) -> None:
    """Undecided transactions of so many keys."""
    del stack
    run = Executor(case.publishing, case.database.schema)
    with case.publishing.transaction():
        for n in range(KEYS):
            half = HalfTransaction(producer_group="shop", messages=[Message(topic="ordered", key=f"k{n}", body=b"{}")])
            commit_log.append_half(run, case.catalog, half)


def _held(stack: contextlib.ExitStack, case: Case) -> None:
    """And a decided message behind each."""
    _open(stack, case)
    case.drain()
    case.publish([Message(topic="ordered", key=f"k{n}", body=b"{}") for n in range(KEYS)])


def _passed(stack: contextlib.ExitStack, case: Case) -> None:
    """Delayed messages and retries come and go, and nothing of them can be removed."""
    reader = stack.enter_context(psycopg.connect(case.database.conninfo))
    reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    reader.execute("SELECT 1 FROM outbox.broker")
    case.publish([Message(topic="topic-0", body=b"{}")])
    case.drain()
    for _ in range(PASSED // 1000):
        case.publishing.execute(
            "INSERT INTO outbox.scheduled (log_id, due_at, queue_id, attempt)"
            " SELECT 1, clock_timestamp(), 1, n FROM generate_series(1, 1000) AS n"
        )
        case.drain()


if __name__ == "__main__":
    main()
