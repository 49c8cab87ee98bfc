"""Retention: the cost of a pass without work, and of clearing behind a backlog of retries."""

from __future__ import annotations

import os
import time

import psycopg

from benchmarks.bulk import prepared
from benchmarks.harness import Spread, server, table
from outbox.broker import embedded
from outbox.broker.database.executor import Executor
from outbox.broker.maintenance import retention

SIZES = tuple(int(size) for size in os.environ.get("OUTBOX_BENCH_SIZES", "300000 3000000").split())
TOPICS = 106
QUEUES = 8
STUCK = 20_000
CLEARED = 50_000
REPEATS = 5

# Topics with a group each, which has consumed all of its messages: an hour ago, too young to be removed.
_FILL = """
    INSERT INTO outbox.topic (name, message_types, queue_count)
    SELECT 'topic-' || n, '{NORMAL}', %(queues)s FROM generate_series(1, %(topics)s) AS n;
    INSERT INTO outbox.queue (topic_id, number)
    SELECT topic_id, n FROM outbox.topic, generate_series(0, %(queues)s - 1) AS n WHERE name LIKE 'topic-%%';
    INSERT INTO outbox.consumer_group (name)
    SELECT 'group-' || n FROM generate_series(1, %(topics)s) AS n;
    INSERT INTO outbox.subscription (group_id, topic_id, mode)
    SELECT group_id, topic_id, 'concurrent'
    FROM outbox.consumer_group g JOIN outbox.topic t ON replace(g.name, 'group', 'topic') = t.name;
    CREATE TEMPORARY TABLE place AS
    SELECT row_number() OVER (ORDER BY queue_id) - 1 AS place, queue_id, topic_id
    FROM outbox.queue JOIN outbox.topic USING (topic_id) WHERE name LIKE 'topic-%%';
    INSERT INTO outbox.commit_log (born_at, stored_at, transaction_id, message_id, topic_id, half, key, tag,
        content_type, body)
    SELECT now(), now() - interval '1 hour', id, id, topic_id, false, '', '', 'application/json', '{"n":1}'
    FROM (SELECT n, gen_random_uuid() AS id FROM generate_series(0, %(messages)s - 1) AS n) AS given
    JOIN place ON place = n %% %(places)s ORDER BY n;
    INSERT INTO outbox.op_log (transaction_id, decision, decided_by, log_ids)
    SELECT transaction_id, 'C', 'P', ARRAY[log_id] FROM outbox.commit_log;
    INSERT INTO outbox.consume_queue (queue_offset, log_id, queue_id, attempt, queued_at)
    SELECT n / %(places)s, log_id, queue_id, 0, now() - interval '1 hour'
    FROM (SELECT log_id, row_number() OVER (ORDER BY log_id) - 1 AS n FROM outbox.commit_log) AS stored
    JOIN place ON place = n %% %(places)s;
    INSERT INTO outbox.consumer_offset (group_id, queue_id, epoch, ordinal, next_offset, start_offset, handled)
    SELECT group_id, queue_id, 1, 1, %(messages)s / %(places)s + 1, 0, %(messages)s / %(places)s + 1
    FROM outbox.subscription JOIN outbox.queue USING (topic_id);
"""

# The first messages are dead letters of their groups, old, and kept below the floors of their queues.
_KEEP = """
    INSERT INTO outbox.dead_letter (group_id, log_id, attempts, error)
    SELECT group_id, log_id, 16, 'ValueError: no' FROM outbox.commit_log JOIN outbox.subscription USING (topic_id)
    ORDER BY log_id LIMIT %(stuck)s;
    UPDATE outbox.commit_log SET stored_at = stored_at - interval '4 days'
    WHERE log_id IN (SELECT log_id FROM outbox.dead_letter);
"""

# So many of the next messages are old, and behind them in the log one group has retries waiting in its retry queue.
_AGE = """
    UPDATE outbox.commit_log SET stored_at = stored_at - interval '4 days'
    WHERE log_id IN (SELECT log_id FROM outbox.commit_log WHERE stored_at > now() - interval '2 days'
                     ORDER BY log_id LIMIT %(cleared)s);
"""
_RETRY = """
    INSERT INTO outbox.topic (name, message_types, queue_count, retry_of)
    SELECT '%%RETRY%%group-1', '{NORMAL}', 1, group_id FROM outbox.consumer_group WHERE name = 'group-1';
    INSERT INTO outbox.queue (topic_id, number) SELECT topic_id, 0 FROM outbox.topic WHERE retry_of IS NOT NULL;
    INSERT INTO outbox.consume_queue (queue_offset, log_id, queue_id, attempt)
    SELECT row_number() OVER (ORDER BY log_id) - 1, log_id, queue_id, 1
    FROM (SELECT log_id FROM outbox.commit_log ORDER BY log_id DESC LIMIT %(stuck)s) AS newest,
         (SELECT max(queue_id) AS queue_id FROM outbox.queue) AS made;
    INSERT INTO outbox.failure (group_id, log_id, attempt, error)
    SELECT retry_of, log_id, 0, 'ValueError: no'
    FROM (SELECT log_id FROM outbox.commit_log ORDER BY log_id DESC LIMIT %(stuck)s) AS newest,
         outbox.topic WHERE retry_of IS NOT NULL;
"""


def main() -> None:
    print(f"\nretention: {TOPICS * QUEUES} queues, {REPEATS} passes each")
    rows = []
    with server() as url:
        for size in SIZES:
            rows.append([f"{size:,}", *measured_at(embedded.create_database(url, f"retention_{size}"), size)])
    table(
        "a pass (median, low to high), and clearing",
        [
            "messages in the log",
            "nothing to do, ms",
            f"{STUCK:,} dead letters kept, ms",
            f"removing {CLEARED:,}, seconds",
            f"the same beside {STUCK:,} waiting retries, seconds",
        ],
        rows,
    )


def measured_at(url: str, size: int) -> list[str]:
    """One row of the table."""
    prepared(url).close()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET synchronous_commit TO off")
        _fill(connection, _FILL, messages=size)
        connection.execute("VACUUM ANALYZE")
        idle = _passes(connection)
        _fill(connection, _KEEP)
        _until_done(connection)
        kept = _passes(connection)
        _fill(connection, _AGE)
        cleared = _until_done(connection)
        _fill(connection, _RETRY)
        _fill(connection, _AGE)
        beside = _until_done(connection)
    return [f"{idle}", f"{kept}", f"{cleared:.2f}", f"{beside:.2f}"]


def _fill(connection: psycopg.Connection, script: str, *, messages: int = 0) -> None:
    values = {
        "messages": messages, "topics": TOPICS, "queues": QUEUES, "places": TOPICS * QUEUES, "stuck": STUCK,
        "cleared": CLEARED,
    }  # fmt: skip
    for statement in script.split(";\n"):
        if statement.strip():
            psycopg.ClientCursor(connection).execute(statement.encode(), values)


def _passes(connection: psycopg.Connection) -> Spread:
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        counts = retention.run_once(Executor(connection, "outbox"))
        seconds.append((time.perf_counter() - started) * 1e3)
        assert counts.messages == 0, "there was something to do"
    return Spread.of(seconds)


def _until_done(connection: psycopg.Connection) -> float:
    started = time.perf_counter()
    while retention.run_once(Executor(connection, "outbox")).more:
        pass
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
