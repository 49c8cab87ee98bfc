"""The cost of status, probe, metrics and the summary behind them, as the log and the groups grow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import psycopg

from benchmarks.harness import server, table, timed
from benchmarks.pages import PAGES
from outbox.broker import embedded
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.operations import rules, summary
from outbox.broker.operations.rules import survey
from outbox.broker.operations.summary import overview
from outbox.broker.schema.install import install
from outbox.contrib.prometheus.collector import BrokerCollector, ScrapeState

# (messages, topics, groups); each group subscribes to every topic, each topic has eight queues.
SIZES = ((10_000, 20, 2), (int(os.environ.get("OUTBOX_BENCH_MESSAGES", "10000000")), 200, 20))
REPEATS = 20
_CHUNK = 1_000_000

_TOPICS = """
INSERT INTO outbox.topic (name, message_types, queue_count)
SELECT 'topic-' || n, ARRAY['NORMAL', 'TRANSACTION'], 8 FROM generate_series(1, %(topics)s) AS n;
INSERT INTO outbox.queue (topic_id, number)
SELECT topic_id, number FROM outbox.topic, generate_series(0, 7) AS number ORDER BY 1, 2;
INSERT INTO outbox.consumer_group (name) SELECT 'group-' || n FROM generate_series(1, %(groups)s) AS n;
INSERT INTO outbox.subscription (group_id, topic_id, mode)
SELECT group_id, topic_id, CASE WHEN group_id %% 4 = 0 THEN 'orderly' ELSE 'concurrent' END
FROM outbox.consumer_group, outbox.topic;
INSERT INTO outbox.consumer (instance_id, group_id, topics, host, pid, expires_at)
SELECT gen_random_uuid(), group_id, ARRAY(SELECT name FROM outbox.topic), 'bench', 1, now() + interval '1 day'
FROM outbox.consumer_group;
"""

# Messages take the queues in turn, so an offset is the number of rounds before.
_MESSAGES = """
WITH given AS (
    SELECT n, gen_random_uuid() AS id, (SELECT count(*) FROM outbox.queue) AS queues
    FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n
), stored AS (
    INSERT INTO outbox.commit_log (born_at, transaction_id, message_id, topic_id, half, key, tag, content_type, body)
    SELECT now(), id, id, 1 + (n %% queues) / 8, false, '', '', 'application/json', convert_to(repeat('x', 260), 'UTF8')
    FROM given ORDER BY n
    RETURNING log_id, transaction_id
), decided AS (
    INSERT INTO outbox.op_log (transaction_id, decision, decided_by, log_ids)
    SELECT transaction_id, 'C', 'P', ARRAY[log_id] FROM stored
)
INSERT INTO outbox.consume_queue (queue_offset, log_id, queue_id, attempt)
SELECT (log_id - 1) / queues, log_id, 1 + (log_id - 1) %% queues, 0
FROM stored, (SELECT count(*) AS queues FROM outbox.queue) AS counted
"""

# Every group is fifty messages behind on each queue, and its positions were stored a few times since the last trim.
_POSITIONS = """
INSERT INTO outbox.consumer_offset (next_offset, epoch, ordinal, handled, start_offset, group_id, queue_id)
SELECT greatest(0, head - 50 - back), 1, 10 - back, greatest(0, head - 50 - back), 0, group_id, queue_id
FROM (SELECT queue_id, max(queue_offset) + 1 AS head FROM outbox.consume_queue GROUP BY queue_id) AS heads,
     outbox.consumer_group, generate_series(0, 4) AS back;
INSERT INTO outbox.queue_lease (group_id, queue_id, owner, epoch, expires_at)
SELECT group_id, queue_id, gen_random_uuid(), 1, now() + interval '1 day' FROM outbox.consumer_group, outbox.queue;
INSERT INTO outbox.leader_lease VALUES ('sequencer', gen_random_uuid(), 1, now() + interval '1 day');
INSERT INTO outbox.dead_letter (group_id, log_id, attempts, error, dead_at)
SELECT group_id, log_id, 16, 'ValueError: no', now() - interval '2 days'
FROM outbox.consumer_group, generate_series(1, 500) AS log_id;
INSERT INTO outbox.tick (tick_id, snapshot, incarnation, appended, queue_ids, heads, is_full)
SELECT 1, pg_current_snapshot(), 1, 0, '{}', '{}', true;
"""


def main() -> None:
    rows, pages = [], []
    with server() as url:
        for number, (messages, topics, groups) in enumerate(SIZES):
            of_size = embedded.create_database(url, f"status_{number}")
            started = time.perf_counter()
            fill(of_size, messages, topics, groups)
            print(f"{messages:,} messages stored in {time.perf_counter() - started:.0f} s", flush=True)
            rows.append([f"{messages:,}", str(topics), str(groups), *measure(of_size)])
            pages.append([f"{messages:,}", *pages_of(of_size)])
    table(
        f"milliseconds (median of {REPEATS}, low to high)",
        ["messages", "topics", "groups", "summary (background)", "status", "probe", "scrape", "status without summary"],
        rows,
    )
    table("the operations page: milliseconds (median of 10, low to high); kilobytes", ["messages", *PAGES], pages)


def pages_of(url: str) -> list[str]:
    """The time of each page, from a process that has Django, with a fresh summary."""
    with BrokerDatabase(url).connect() as connection:
        summary.refresh(Executor(connection, "outbox"))
    command = [sys.executable, "-m", "benchmarks.pages", url]
    found: dict[str, str] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return list(found.values())


def fill(url: str, messages: int, topics: int, groups: int) -> None:
    """A store of that size, by SQL."""
    with psycopg.connect(url, autocommit=True, cursor_factory=psycopg.ClientCursor) as connection:
        install(connection, "outbox")
        connection.execute("SET synchronous_commit = off")
        connection.execute(_TOPICS, {"topics": topics, "groups": groups})
        for first in range(1, messages + 1, _CHUNK):
            connection.execute(_MESSAGES, {"first": first, "last": min(messages, first + _CHUNK - 1)})
        connection.execute(_POSITIONS)
        connection.execute("VACUUM ANALYZE")


def measure(url: str) -> list[str]:
    """The columns of the table."""
    with BrokerDatabase(url).connect() as connection:
        run = Executor(connection, "outbox")

        def status() -> None:
            found = survey(run)
            assert found.state is not None
            overview(run, found.state.summary)

        def scrape() -> None:
            found = survey(run)
            assert found.state is not None
            state = ScrapeState(found.verdict, overview(run, found.state.summary), found.state.summary)
            collector = BrokerCollector(lambda: state)
            for metric in collector.collect():
                assert metric.name

        counting = timed(lambda: summary.refresh(run), REPEATS // 4)
        columns = [
            counting,
            timed(status, REPEATS),
            timed(lambda: rules.probe(run), REPEATS),
            timed(scrape, REPEATS),
        ]
        connection.execute("DELETE FROM outbox.summary")
        return [*columns, timed(status, REPEATS // 4)]


if __name__ == "__main__":
    main()
