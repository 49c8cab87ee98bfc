"""Searchable topics: what the index of keys costs with each message, and what it saves of a search.

The kinds are databases of one server, and take turns: no topic is searchable; other topics are; the topic itself is.
Each message is an INSERT of its own into the log, in a loop of the server, so that the figures are those of the row and
not of the client. OUTBOX_BENCH_MESSAGES: messages per round and kind. OUTBOX_BENCH_ROWS: rows of the log that a search
meets.
"""

from __future__ import annotations

import os
from typing import Final

import psycopg
from psycopg import sql

from benchmarks import processes
from benchmarks.harness import REPEATS, Spread, measured, server, table, timed
from outbox.broker import embedded
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.log.topics import declare_topics, find_topic_id
from outbox.broker.schema import key_index
from outbox.broker.schema.install import install
from outbox.contrib.erasure import broker_rows
from outbox.topic import Topic

MESSAGES: Final = int(os.environ.get("OUTBOX_BENCH_MESSAGES", "20000"))
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
_LOOP: Final = """
DO $$
DECLARE
    topic integer := (SELECT topic_id FROM outbox.topic WHERE name = '{topic}');
BEGIN
    FOR number IN 1..{messages} LOOP
        INSERT INTO outbox.commit_log
            (born_at, transaction_id, message_id, topic_id, half, key, tag, content_type, body)
        VALUES (now(), gen_random_uuid(), gen_random_uuid(), topic, false, gen_random_uuid()::text, '',
                'application/json', {body});
    END LOOP;
END $$
"""
_FILL: Final = """
INSERT INTO outbox.commit_log (born_at, transaction_id, message_id, topic_id, half, key, tag, content_type, body)
SELECT now(), gen_random_uuid(), gen_random_uuid(), %s, false, gen_random_uuid()::text, '', 'application/json', %s
FROM generate_series(1, %s)
"""
_INDEX_BYTES: Final = """
SELECT coalesce(sum(pg_relation_size(oid)), 0)::bigint FROM pg_class WHERE relname LIKE 'commit_log_key_of_%'
"""


def main() -> None:
    print(f"\nsearchable: {REPEATS} rounds of {MESSAGES:,} messages with keys of 36 characters")
    # No checkpoint and no wait for the disk, so that the figures are those of the index.
    with server(checkpoint_timeout="1d", autovacuum="off", synchronous_commit="off") as url:
        made = {kind: _prepared(embedded.create_database(url, f"kind{i}"), kind) for i, kind in enumerate(KINDS)}
        cpu: dict[str, list[float]] = {kind: [] for kind in KINDS}
        wal: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(REPEATS):
            for kind, address in made.items():
                with measured(address) as usage:
                    cpu[kind].append(_insert(address))
                wal[kind].append(usage().wal_bytes / MESSAGES)
        first = next(iter(KINDS))
        table(
            "each message (median, low to high)",
            ["searchable", "µs of the server's CPU", "more than the first", "WAL bytes", "index bytes"],
            [
                [
                    kind,
                    f"{Spread.of(cpu[kind]):.1f}",
                    f"{Spread.of([a - b for a, b in zip(cpu[kind], cpu[first], strict=True)]):.1f}",
                    f"{Spread.of(wal[kind])}",
                    f"{_index_bytes(address) / MESSAGES / (REPEATS + 1):.0f}",
                ]
                for kind, address in made.items()
            ],
        )
        table(
            f"search of a key among {ROWS:,} rows: milliseconds (median, low to high)",
            ["searchable", "outbox_erase TOPIC --key"],
            [[kind, _searched(made[kind])] for kind in (first, "the topic itself")],
        )


def _prepared(address: str, kind: str) -> str:
    with BrokerDatabase(address).connect(name="bench") as connection:
        install(connection)
        run = Executor(connection, "outbox")
        names = {TOPIC, *(name for names in KINDS.values() for name in names)}
        declare_topics(run, [Topic(name=name, searchable=name in KINDS[kind]) for name in sorted(names)])
        key_index.adapt(run, report=lambda text: None)
    _insert(address)
    return address


def _insert(address: str) -> float:
    """Store the messages of a round; microseconds of the session's CPU per message."""
    with psycopg.connect(address) as connection:
        body = sql.Literal(_BODY).as_string(connection)
        before = processes.read(connection.info.backend_pid)
        connection.execute(_LOOP.format(topic=TOPIC, body=body, messages=MESSAGES).encode())
        after = processes.read(connection.info.backend_pid)
    assert before and after
    return (after.seconds - before.seconds) / MESSAGES * 1e6


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
        assert len(broker_rows.find_key(run, TOPIC, key)) == 1
        return timed(lambda: broker_rows.find_key(run, TOPIC, key), REPEATS)


if __name__ == "__main__":
    main()
