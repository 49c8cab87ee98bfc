"""The cost of a message as the log and the number of topics grow: the end-to-end bulk rate, and CPU singly and in bulk.

Every topic has eight queues and a group, all groups in one consumer process. Rounds are interleaved, so that each row's
ratio to the first is of one round. OUTBOX_BENCH_SIZES and OUTBOX_BENCH_TOPICS set the cases, OUTBOX_BENCH_MESSAGES the
messages of a bulk job.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg

from benchmarks import processes
from benchmarks.bulk import BODY, process
from benchmarks.claiming import BATCH
from benchmarks.harness import REPEATS, Spread, server, table
from benchmarks.peers import record
from outbox.broker import embedded
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.postgres import PostgresBroker
from outbox.broker.schema.install import install
from outbox.message import Message

SIZES = [int(size) for size in os.environ.get("OUTBOX_BENCH_SIZES", "10000 1000000 10000000").split()]
TOPICS = [int(topics) for topics in os.environ.get("OUTBOX_BENCH_TOPICS", "1 20 200").split()]
MESSAGES = int(os.environ.get("OUTBOX_BENCH_MESSAGES", "50000"))
SINGLES = max(200, MESSAGES // 50)
SINGLES_PER_SECOND = 200
_CHUNK = 1_000_000
_DEADLINE_SECONDS = 300

_TOPICS = """
INSERT INTO outbox.topic (name, message_types, queue_count)
SELECT 'topic-' || n, ARRAY['NORMAL'], 8 FROM generate_series(1, %(topics)s) AS n;
INSERT INTO outbox.queue (topic_id, number)
SELECT topic_id, number FROM outbox.topic, generate_series(0, 7) AS number ORDER BY 1, 2;
INSERT INTO outbox.consumer_group (name) SELECT 'group-' || n FROM generate_series(1, %(topics)s) AS n;
INSERT INTO outbox.subscription (group_id, topic_id, mode)
SELECT group_id, topic_id, 'concurrent'
FROM outbox.consumer_group g JOIN outbox.topic t ON replace(g.name, 'group', 'topic') = t.name;
"""

# Sent, decided and queued, the queues in turn. Ids rise, as those that the producer draws do.
_STORED = """
WITH given AS (
    SELECT n, lpad(to_hex(n), 32, '0')::uuid AS id
    FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n
), stored AS (
    INSERT INTO outbox.commit_log (born_at, transaction_id, message_id, topic_id, half, key, tag, content_type, body)
    SELECT now(), id, id, 1 + (n %% %(queues)s) / 8, false, '', '', 'application/json', '{"n":1}'
    FROM given ORDER BY n
    RETURNING log_id, transaction_id
), decided AS (
    INSERT INTO outbox.op_log (transaction_id, decision, decided_by, log_ids)
    SELECT transaction_id, 'C', 'P', ARRAY[log_id] FROM stored
)
INSERT INTO outbox.consume_queue (queue_offset, log_id, queue_id, attempt)
SELECT (log_id - 1) / %(queues)s, log_id, 1 + (log_id - 1) %% %(queues)s, 0 FROM stored
"""

# All of it consumed, and read by the sequencer.
_POSITIONS = """
INSERT INTO outbox.consumer_offset (group_id, queue_id, epoch, ordinal, next_offset, start_offset, handled)
SELECT group_id, queue_id, 0, 1, head, 0, head
FROM outbox.subscription JOIN outbox.queue USING (topic_id)
JOIN (SELECT queue_id, max(queue_offset) + 1 AS head FROM outbox.consume_queue GROUP BY queue_id) AS heads
    USING (queue_id);
INSERT INTO outbox.tick (tick_id, snapshot, incarnation, appended, queue_ids, heads, is_full)
SELECT (SELECT coalesce(max(tick_id), 0) + 1 FROM outbox.tick), pg_current_snapshot(),
       (SELECT incarnation FROM outbox.broker), 0, array_agg(queue_id), array_agg(head), true
FROM (SELECT queue_id, max(queue_offset) + 1 AS head FROM outbox.consume_queue GROUP BY queue_id) AS heads;
"""


@dataclass(frozen=True)
class Cost:
    """Bulk messages per second, and microseconds of CPU per message of everything but the producer."""

    rate: float
    bulk_cpu: float
    single_cpu: float


def main() -> None:
    cases = [(size, TOPICS[0]) for size in SIZES] + [(SIZES[0], topics) for topics in TOPICS[1:]]
    print(f"\ngrowth: {MESSAGES:,} messages in bulk, {SINGLES:,} singly at {SINGLES_PER_SECOND}/s, {REPEATS} rounds")
    costs: dict[tuple[int, int], list[Cost]] = {case: [] for case in cases}
    with server() as url:
        databases = {}
        for number, (size, topics) in enumerate(cases):
            started = time.perf_counter()
            databases[size, topics] = embedded.create_database(url, f"growth_{number}")
            fill(databases[size, topics], size, topics)
            print(f"{size:,} messages in {topics} topics stored in {time.perf_counter() - started:.0f} s", flush=True)
        for _ in range(REPEATS):
            for case, database in databases.items():
                costs[case].append(measure(database, case[1]))
    show(costs)


def show(costs: dict[tuple[int, int], list[Cost]]) -> None:
    first = next(iter(costs.values()))

    def columns(found: Sequence[Cost], value: Callable[[Cost], float]) -> list[str]:
        ratio = Spread.of([value(a) / value(b) for a, b in zip(found, first, strict=True)])
        return [f"{Spread.of([value(cost) for cost in found])}", f"{ratio:.2f}"]

    table(
        "cost per message (median, low to high); ratios to the first row of the same round",
        [
            *("messages stored", "topics", "bulk messages/s", "its ratio"),
            *("CPU us/message in bulk", "bulk ratio", "CPU us/message singly", "single ratio"),
        ],
        [
            [
                f"{size:,}",
                str(topics),
                *columns(found, lambda cost: cost.rate),
                *columns(found, lambda cost: cost.bulk_cpu),
                *columns(found, lambda cost: cost.single_cpu),
            ]
            for (size, topics), found in costs.items()
        ],
    )


def fill(url: str, messages: int, topics: int) -> None:
    """A store of that size, by SQL."""
    with psycopg.connect(url, autocommit=True, cursor_factory=psycopg.ClientCursor) as connection:
        install(connection, "outbox")
        connection.execute("SET synchronous_commit = off")
        connection.execute(_TOPICS, {"topics": topics})
        for first in range(1, messages + 1, _CHUNK):
            last = min(messages, first + _CHUNK - 1)
            connection.execute(_STORED, {"first": first, "last": last, "queues": topics * 8})
        connection.execute(_POSITIONS)
        connection.execute("VACUUM ANALYZE")
        connection.execute("CHECKPOINT")


def measure(url: str, topics: int) -> Cost:
    """Once the worker's processes have handled some messages of every queue."""
    with TemporaryDirectory(prefix="outbox-bench-") as folder, contextlib.ExitStack() as stack:
        calls = Path(folder) / "handled"
        os.environ["OUTBOX_BENCH_HANDLED"] = str(calls)
        broker = stack.enter_context(contextlib.closing(PostgresBroker(BrokerDatabase(conninfo=url))))
        sequencer = stack.enter_context(process("outbox.broker", url))
        consumer = stack.enter_context(process("benchmarks.growth_consumer", url, "--topics", str(topics)))
        connection = stack.enter_context(psycopg.connect(url, autocommit=True))
        pids = (sequencer.pid, consumer.pid, processes.postmaster(connection))
        done = send_all(broker, topics, 16 * topics, 16)
        wait(calls, done)

        before, started = cpu(*pids), time.time_ns()
        done += send_all(broker, topics, MESSAGES, BATCH)
        ended = wait(calls, done)
        bulk_cpu = (cpu(*pids) - before) / MESSAGES

        before = cpu(*pids)
        for number in paced(SINGLES, SINGLES_PER_SECOND):
            broker.send([message(number % topics)])
        wait(calls, done + SINGLES)
        single_cpu = (cpu(*pids) - before) / SINGLES
    return Cost(MESSAGES / ((ended - started) / 1e9), bulk_cpu * 1e6, single_cpu * 1e6)


def message(topic: int) -> Message:
    return Message(topic=f"topic-{topic + 1}", body=BODY)


def send_all(broker: PostgresBroker, topics: int, count: int, batch: int) -> int:
    """Send `count` messages in batches, each to the next topic; how many."""
    for number, first in enumerate(range(0, count, batch)):
        broker.send([message(number % topics) for _ in range(min(batch, count - first))])
    return count


def paced(count: int, per_second: float) -> Iterator[int]:
    started = time.perf_counter()
    for number in range(count):
        time.sleep(max(0.0, started + number / per_second - time.perf_counter()))
        yield number


def cpu(*roots: int) -> float:
    """Seconds of these processes and of what descends from them, ended children included."""
    found = [one for root in roots for one in processes.tree(root)]
    return sum(one.seconds + one.of_ended_children for one in found)


def wait(calls: Path, count: int) -> int:
    """Until so many messages are handled; when the last call of them began, in ns since 1970."""
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while True:
        entries = record.entries(calls)
        if sum(number for number, _ in entries) >= count:
            return max(at for _, at in entries)
        if time.monotonic() > deadline:
            raise SystemExit(f"growth: {count} messages were not handled within {_DEADLINE_SECONDS} s")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
