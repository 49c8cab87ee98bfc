"""The sequencer and delivery times: a delayed message is queued when it is due, or recalled before."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.postgres import PostgresBroker
from tests.broker.support import end, half, message, new_sequencer, queued_ids


def test_a_delayed_message_and_a_retry_are_queued_when_due(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    sequencer = new_sequencer(database)
    delayed = message(deliver_at=datetime.now(UTC) + timedelta(hours=1))
    past = message(deliver_at=datetime.now(UTC) - timedelta(days=1))
    receipts = broker.send([delayed, past])
    counts = sequencer.run_once(connection)
    assert (counts.appended, counts.scheduled) == (1, 1)
    assert counts.next_due_seconds is not None and 0 < counts.next_due_seconds <= 3600
    # A consumer sends the other message back, due at once.
    connection.execute(
        "INSERT INTO outbox.scheduled (log_id, due_at, queue_id, attempt)"
        " SELECT %s, now(), min(queue_id), 1 FROM outbox.queue",
        [receipts[1].position],
    )
    assert sequencer.run_once(connection).due == 1
    connection.execute("UPDATE outbox.scheduled SET due_at = now()")
    counts = sequencer.run_once(connection)
    assert (counts.due, counts.appended) == (1, 1)
    assert sorted(queued_ids(connection)) == sorted([past.message_id, past.message_id, delayed.message_id])
    assert connection.execute("SELECT count(*) FROM outbox.scheduled").fetchone() == (0,)


def test_a_transactional_message_decided_after_its_delivery_time_is_due_at_once(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    late = half(message(deliver_at=datetime.now(UTC) - timedelta(seconds=5)))
    broker.send_half(late)
    broker.end([end(late.transaction_id)])
    assert new_sequencer(database).run_once(connection).appended == 1
