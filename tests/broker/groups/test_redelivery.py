"""Messages that have left their queue: the count of their attempts, whose columns are smallints."""

from __future__ import annotations

from outbox.broker.database.connection import BrokerConnection
from outbox.broker.database.executor import Executor
from outbox.broker.groups.redelivery import Redelivery, record_failure
from outbox.broker.postgres import PostgresBroker
from outbox.retry import MAX_ATTEMPTS
from tests.broker.support import message


def test_a_message_without_a_limit_of_attempts_is_tried_again_after_the_last_one_that_is_counted(
    broker: PostgresBroker, connection: BrokerConnection
) -> None:
    """Otherwise its failure could not be stored, and the process would fail with it again and again."""
    [receipt] = broker.send([message()])
    waiting = "SELECT attempt, due_at > now() + interval '1 hour' FROM outbox.scheduled"
    for attempt in (MAX_ATTEMPTS, 32_767):
        connection.execute(
            "INSERT INTO outbox.scheduled (log_id, due_at, queue_id, attempt) VALUES (%s, now(), 1, %s)",
            [receipt.position, attempt],
        )
        assert isinstance(receipt.position, int)
        place = Redelivery(receipt.position, 1, attempt)
        run = Executor(connection, "outbox")
        assert record_failure(run, 1, place, dead=False, attempts=attempt + 1, error="x", seconds=7200)
        assert connection.execute(waiting.encode()).fetchall() == [(MAX_ATTEMPTS, True)]
        connection.execute("DELETE FROM outbox.scheduled")
