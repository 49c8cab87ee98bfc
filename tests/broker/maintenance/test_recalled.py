"""Retention of recalled messages."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.postgres import PostgresBroker
from tests.broker.maintenance.test_upkeep import _age, _balanced, _clean, _consume, _count, _subscribe
from tests.broker.support import drain, message, new_sequencer


def test_what_was_recalled_is_removed_and_its_totals_stay(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    """A delayed message, and the retry of one whose message is pruned like any other."""
    _subscribe(connection, "orders")
    delayed, retried = message(deliver_at=datetime.now(UTC) + timedelta(hours=1)), message()
    broker.send([delayed, retried])
    drain(new_sequencer(database), connection)
    _consume(connection)
    connection.execute(
        "WITH topic AS (INSERT INTO outbox.topic (name, message_types, queue_count, retry_of)"
        " SELECT '%RETRY%readers', '{NORMAL}', 1, group_id FROM outbox.consumer_group RETURNING topic_id),"
        " queue AS (INSERT INTO outbox.queue (topic_id, number) SELECT topic_id, 0 FROM topic RETURNING queue_id)"
        " INSERT INTO outbox.scheduled (log_id, due_at, queue_id, attempt)"
        " SELECT log_id, now(), queue_id, 1 FROM queue, outbox.commit_log WHERE deliver_at IS NULL"
    )
    connection.execute("UPDATE outbox.consumer_offset SET handled = 0, sent_back = 1")
    assert _balanced(connection).groups["readers"].retrying == 1
    outcomes = broker.recall([delayed.message_id, retried.message_id])
    assert [(one.status, one.groups) for one in outcomes] == [("recalled", ()), ("recalled", ("readers",))]
    before = _balanced(connection)
    assert (before.groups["readers"].recalled, before.groups["readers"].retrying) == (1, 0)
    _age(connection, 4)
    _clean(connection)
    assert [_count(connection, table) for table in ("commit_log", "recalled", "recalled_retry")] == [0, 0, 0]
    after = _balanced(connection)
    assert after.topics == before.topics
    assert after.groups == before.groups
