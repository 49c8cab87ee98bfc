"""Whether the system of tests/broker/schema/version_process.py kept the promise: orders = messages = effects."""

from __future__ import annotations

import psycopg

from outbox.broker.database.executor import Executor
from outbox.broker.operations.audit import count_messages
from tests.broker.schema.versions import Processes
from tests.broker.support import assert_gapless
from tests.support import eventually


def count(connection: psycopg.Connection[tuple[int]], statement: str) -> int:
    row = connection.execute(statement.encode()).fetchone()
    assert row is not None
    return row[0]


def grows(connection: psycopg.Connection[tuple[int]], by: int) -> None:
    """Wait until that many more messages have had their effect, on both paths."""
    statement = "SELECT count(*) FROM effect JOIN business USING (message_id) WHERE path = '{}'"
    for path in ("atomic", "two-phase"):
        one = statement.format(path)
        goal = count(connection, one) + by
        eventually(lambda one=one, goal=goal: count(connection, one) >= goal, within_seconds=60, what=path)  # type: ignore[misc]


def finish(processes: Processes, connection: psycopg.Connection[tuple[int]]) -> None:
    """Stop publishing, let everything come to its end, judge, and stop all processes."""
    processes.stop(role="produce")
    orders, effects = "SELECT count(*) FROM business", "SELECT count(*) FROM effect"
    eventually(
        lambda: count(connection, orders) == count(connection, effects),
        within_seconds=60,
        what="every order has its effect",
    )
    processes.stop(role="consume")
    eventually(lambda: not undecided(connection), within_seconds=60, what="all halves are decided")
    processes.stop(role="check")
    assert_promise_kept(connection)
    processes.stop()


def undecided(connection: psycopg.Connection[tuple[int]]) -> int:
    return count(
        connection,
        "SELECT count(*) FROM outbox.commit_log log WHERE half"
        " AND NOT EXISTS (SELECT FROM outbox.op_log op WHERE op.transaction_id = log.transaction_id)",
    )


def assert_promise_kept(connection: psycopg.Connection[tuple[int]]) -> None:
    differing = (
        "SELECT count(*) FROM (SELECT message_id FROM business) b FULL JOIN ({}) o USING (message_id)"
        " WHERE b.message_id IS NULL OR o.message_id IS NULL"
    )
    assert count(connection, differing.format("SELECT message_id FROM effect")) == 0
    queued = "SELECT message_id FROM outbox.consume_queue JOIN outbox.commit_log USING (log_id) WHERE attempt = 0"
    assert count(connection, differing.format(queued)) == 0
    doubled = (
        "SELECT count(*) FROM (SELECT log_id FROM outbox.consume_queue WHERE attempt = 0"
        " GROUP BY log_id HAVING count(*) > 1) d"
    )
    assert count(connection, doubled) == 0
    assert_gapless(connection)
    assert count_messages(Executor(connection, "outbox")).differences() == []
