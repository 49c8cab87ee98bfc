"""Searchable topics: what the index of keys costs with each message, and what it saves of a search.

The kinds are databases of one server, and take turns: no topic is searchable; other topics are; the topic itself is.
OUTBOX_BENCH_MESSAGES: messages per round and kind. OUTBOX_BENCH_ROWS: rows of the log that a search meets.
"""

from __future__ import annotations

import os
from typing import Final
from uuid import uuid4

import psycopg

from benchmarks import processes
from benchmarks.harness import REPEATS, Spread, measured, server, table, timed
from outbox.broker import embedded
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.log.topics import declare_topics, find_topic_id
from outbox.broker.operations import erasing
from outbox.broker.postgres import PostgresBroker
from outbox.broker.schema import key_index
from outbox.broker.schema.install import install
from outbox.message import Message
from outbox.topic import Topic

MESSAGES: Final = int(os.environ.get("OUTBOX_BENCH_MESSAGES", "4000"))
ROWS: Final = int(os.environ.get("OUTBOX_BENCH_ROWS", "1000000"))
TOPIC: Final = "customers"
# The searchable topics of each kind.
KINDS: Final = {
    "no topic is searchable": (),
    "one other topic": ("other0",),
    "five other topics": tuple(f"other{number}" for number in range(5)),
    "the topic itself": (TOPIC,),
}
_BODY: Final = b'{"note": "' + b"x" * 240 + b'"}'
_FILL: Final = """
INSERT INTO outbox.commit_log (born_at, transaction_id, message_id, topic_id, half, key, tag, content_type, body)
SELECT now(), gen_random_uuid(), gen_random_uuid(), %s, false, gen_random_uuid()::text, '', 'application/json', %s
FROM generate_series(1, %s)
"""
_INDEX_BYTES: Final = """
SELECT coalesce(sum(pg_relation_size(oid)), 0)::bigint FROM pg_class WHERE relname LIKE 'commit_log_key_of_%'
"""


def main() -> None:
    print(f"\nsearchable: {REPEATS} rounds of {MESSAGES:,} messages with keys, one per transaction")
    # No checkpoint and no wait for the disk, so that the figures are those of the index.
    with server(checkpoint_timeout="1d", autovacuum="off", synchronous_commit="off") as url:
        made = {kind: _prepared(embedded.create_database(url, f"kind{i}"), kind) for i, kind in enumerate(KINDS)}
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        wal: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(REPEATS):
            for kind, (broker, address) in made.items():
                with measured(address) as usage:
                    before = _server_seconds(address)
                    for _ in range(MESSAGES):
                        broker.send([Message(topic=TOPIC, body=_BODY, key=str(uuid4()))])
                    seconds[kind].append((_server_seconds(address) - before) / MESSAGES * 1e6)
                wal[kind].append(usage().wal_bytes / MESSAGES)
        first = next(iter(KINDS))
        sent = MESSAGES * (REPEATS + 1)
        table(
            "each message (median, low to high)",
            ["searchable", "µs of the server's CPU", "more", "WAL bytes", "index bytes"],
            [
                [
                    kind,
                    f"{Spread.of(seconds[kind])}",
                    f"{Spread.of([a - b for a, b in zip(seconds[kind], seconds[first], strict=True)]):.1f}",
                    f"{Spread.of(wal[kind])}",
                    f"{_index_bytes(address) / sent:.0f}",
                ]
                for kind, (_, address) in made.items()
            ],
        )
        table(
            f"search of a key among {ROWS:,} rows: milliseconds (median, low to high)",
            ["searchable", "outbox_erase TOPIC --key"],
            [[kind, _searched(made[kind][1])] for kind in (first, "the topic itself")],
        )
        for broker, _ in made.values():
            broker.close()


def _prepared(address: str, kind: str) -> tuple[PostgresBroker, str]:
    database = BrokerDatabase(address)
    with database.connect(name="bench") as connection:
        install(connection)
        run = Executor(connection, "outbox")
        names = {TOPIC, *(name for names in KINDS.values() for name in names)}
        declare_topics(run, [Topic(name=name, searchable=name in KINDS[kind]) for name in names])
        key_index.adapt(run, report=lambda text: None)
    broker = PostgresBroker(database)
    for _ in range(MESSAGES):
        broker.send([Message(topic=TOPIC, body=_BODY, key=str(uuid4()))])
    return broker, address


def _server_seconds(address: str) -> float:
    """CPU of the server and its sessions, of which only one publishes."""
    with psycopg.connect(address) as connection:
        return sum(one.seconds + one.of_ended_children for one in processes.tree(processes.postmaster(connection)))


def _index_bytes(address: str) -> int:
    with psycopg.connect(address) as connection:
        row = connection.execute(_INDEX_BYTES).fetchone()
    return int(row[0]) if row else 0


def _searched(address: str) -> str:
    with BrokerDatabase(address).connect(name="bench") as connection:
        run = Executor(connection, "outbox")
        connection.execute(_FILL, [find_topic_id(run, TOPIC), _BODY, ROWS])
        connection.execute("VACUUM ANALYZE outbox.commit_log")
        row = connection.execute("SELECT key FROM outbox.commit_log OFFSET 1000 LIMIT 1").fetchone()
        key = str(row and row[0])
        assert len(erasing.find_key(run, TOPIC, key)) == 1
        return timed(lambda: erasing.find_key(run, TOPIC, key), REPEATS)


if __name__ == "__main__":
    main()
