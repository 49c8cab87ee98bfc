"""The CPU of one tick, of the leader and its backend, while many other rows are stored, wait, or cannot be vacuumed.

Each case has a database of its own; rounds go over all of them, so that ratios to the first are of one machine at one
time. A tick takes one message, published before it; `idle` ones take none. OUTBOX_BENCH_SIZES: log rows.

A second table has the rate at which one leader ends: ticks over a backlog of messages with a decision each, alone, and
while publishers write as fast as they can. OUTBOX_BENCH_BACKLOG: messages of this backlog.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Final
from uuid import uuid4

import psycopg

from benchmarks.bulk import BODY
from benchmarks.harness import Spread, server, table
from outbox.broker import embedded
from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.leading import Sequencer
from outbox.broker.log import commit_log
from outbox.broker.log.topics import TopicCatalog, declare_topics
from outbox.broker.schema.install import install
from outbox.message import Message
from outbox.topic import MessageType, Topic
from outbox.transaction import HalfTransaction

SIZES = tuple(int(size) for size in os.environ.get("OUTBOX_BENCH_SIZES", "10000 300000").split())
ROUNDS = int(os.environ.get("OUTBOX_BENCH_ROUNDS", "9"))
RATE_ROUNDS = min(ROUNDS, 3)
TICKS = 200
KEYS = 10_000
# Retries and delayed messages that came and went while a transaction was held open elsewhere.
PASSED = 30_000
BACKLOG = int(os.environ.get("OUTBOX_BENCH_BACKLOG", "60000"))
# The messages of the backlog are published by SQL, each with a decision of its own, and so many commit together.
_TOGETHER = 100
_FILL = """
SELECT outbox.publish_bytes(%(topic)s, %(body)s, 'application/json',
                            key => CASE WHEN %(has_key)s THEN 'key-' || n %% 1000 ELSE '' END)
FROM generate_series(1, %(together)s) AS n
"""
PUBLISHERS = 2
SEQUENCED: Final = "Messages/s that one leader sequences"
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
    sequencing()


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


# -- the rate at which one leader ends --------------------------------------------------------------


def sequencing() -> None:
    """Print the rate of ticks over a backlog, with a server of their own."""
    rates: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with server() as url, contextlib.ExitStack() as stack:
        cases = [
            _case(stack, url, "topic without order", _nothing),
            _case(stack, url, "FIFO topic, 1,000 keys", _nothing, topic="ordered"),
        ]
        for _ in range(RATE_ROUNDS):
            for case in cases:
                for publishers in (0, PUBLISHERS):
                    rates.setdefault((case.name, publishers), []).append(_rate(case, publishers))
    title = f"{SEQUENCED}, from a backlog of {BACKLOG:,} messages with a decision each, {RATE_ROUNDS} rounds"
    rows = [
        [
            name,
            f"{publishers} publishers" if publishers else "nothing else",
            f"{Spread.of([sequenced for sequenced, _ in found])}",
            f"{Spread.of([published for _, published in found])}" if publishers else "",
        ]
        for (name, publishers), found in rates.items()
    ]
    table(title, ["messages", "beside", "messages/s (median, low to high)", "published meanwhile, messages/s"], rows)


def _rate(case: Case, publishers: int) -> tuple[float, float]:
    """Messages/s of the ticks until the backlog is sequenced, and of the publishers meanwhile."""
    filled = {"topic": case.topic, "body": BODY, "has_key": case.topic == "ordered", "together": _TOGETHER}
    for _ in range(BACKLOG // _TOGETHER):
        case.publishing.execute(_FILL, filled)
    with _publishing(case, publishers) as published:
        before, started = published(), time.perf_counter()
        sequenced = 0
        while sequenced < BACKLOG:
            sequenced += case.sequencer.run_once(case.connection).appended
        seconds = time.perf_counter() - started
        meanwhile = published() - before
    case.drain()
    return sequenced / seconds, meanwhile / seconds


def _message(topic: str, number: int) -> Message:
    return Message(topic=topic, key=f"key-{number % 1000}" if topic == "ordered" else "", body=BODY)


@contextlib.contextmanager
def _publishing(case: Case, publishers: int) -> Iterator[Callable[[], int]]:
    """Publishers write during the block; the value returns the number of messages that they have published."""
    context = multiprocessing.get_context("spawn")
    stop, counts = context.Event(), [context.Value("q", 0) for _ in range(publishers)]
    processes = [
        context.Process(target=_publish, args=(case.database.conninfo, case.topic, stop, counted)) for counted in counts
    ]
    for process in processes:
        process.start()
    try:
        while not all(counted.value for counted in counts):
            if not all(process.is_alive() for process in processes):
                raise SystemExit("ticks: a publisher has ended")
            time.sleep(0.01)
        yield lambda: sum(counted.value for counted in counts)
    finally:
        stop.set()
        for process in processes:
            process.join()


def _publish(conninfo: str, topic: str, stop: Event, counted: Synchronized[int]) -> None:
    database, catalog = BrokerDatabase(conninfo), TopicCatalog()
    with contextlib.closing(database.open()) as connection:
        run = Executor(connection, database.schema)
        while not stop.is_set():
            commit_log.append_decided(run, catalog, [_message(topic, counted.value)])
            counted.value += 1


if __name__ == "__main__":
    main()
