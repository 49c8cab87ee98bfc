"""A statement that the server executes after the COMMIT of a tick, in the same round trip."""

from __future__ import annotations

import uuid
from typing import Any

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.database.notify import Announcements, Channel, listen
from outbox.broker.database.sender import RoundTrip
from outbox.broker.database.statement import Statement
from outbox.broker.postgres import PostgresBroker
from tests.broker.support import another_consumer, end, half, message, new_sequencer, queued_ids
from tests.round_trips import counted

ENTRIES = Statement("SELECT count(*), %(id)s::uuid FROM {schema}.consume_queue")
BROKEN = Statement("SELECT 1 / 0")


class Asking:
    """Asks how many entries there are; the answers, and how often the statement was sent."""

    def __init__(self, statement: Statement = ENTRIES) -> None:
        self.statement = statement
        self.id = uuid.uuid4()
        self.sent = 0
        self.answers: list[Any] = []

    def send(self, trip: RoundTrip) -> int | None:
        self.sent += 1
        return trip.send_adapted(self.statement, {"id": self.id})

    def answered(self, rows: list[Any]) -> None:
        self.answers.append(rows)


def test_it_sees_the_entries_of_the_tick_in_one_round_trip(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    sequencer, asking = new_sequencer(database), Asking()
    sequencer.run_once(connection)
    with counted(connection) as round_trips:
        for count in (1, 2, 3):
            broker.send([message()])
            assert sequencer.run_once(connection, asking).appended == 1
            assert asking.answers[-1] == [(count, asking.id)], "psycopg converts parameters and rows"
            assert round_trips() == 1
        assert not sequencer.run_once(connection, asking).ticked
        assert asking.answers[-1] == [(3, asking.id)], "a tick that changed nothing"


def test_a_tick_that_collides_has_no_answer(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    first, second, asking = new_sequencer(database), new_sequencer(database), Asking()
    other = database.open(name="other")
    for sequencer, of in ((first, connection), (second, other)):
        sequencer.run_once(of)
    broker.send([message()])
    assert first.run_once(connection).appended == 1
    assert second.run_once(other, asking).collided
    assert asking.sent == 1 and asking.answers == []
    broker.send([message()])
    assert second.run_once(other, asking).appended == 1
    assert asking.answers == [[(2, asking.id)]]
    other.close()


def test_a_tick_that_looks_at_fifo_messages_answers_once(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    """The tick is refused first, together with a statement that sees no entry."""
    sequencer, asking = new_sequencer(database), Asking()
    sequencer.run_once(connection)
    one = half(message("ordered", key="k"))
    broker.send_half(one)
    broker.end([end(one.transaction_id)])
    assert sequencer.run_once(connection, asking).appended == 1
    assert asking.answers == [[(1, asking.id)]]


def test_a_statement_that_fails_takes_nothing_of_the_tick(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    """The entries and the notification of the other consumers."""
    sequencer, asking = new_sequencer(database), Asking(BROKEN)
    another_consumer(connection)
    with database.open(name="other") as other:
        other.autocommit = True
        listen(Executor(other, database.schema), Channel.QUEUED)
        announcements = Announcements(other)
        for count in (1, 2, 3):
            broker.send([message()])
            assert sequencer.run_once(connection, asking).appended == 1
            assert len(queued_ids(connection)) == count
            assert announcements.wait(5), "the other consumers are notified"
    assert asking.sent == 3 and asking.answers == []


def test_a_tick_notifies_only_if_another_consumer_lives(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    sequencer = new_sequencer(database)
    another_consumer(connection, lives_seconds=-1.0)
    with database.open(name="other") as other:
        other.autocommit = True
        listen(Executor(other, database.schema), Channel.QUEUED)
        announcements = Announcements(other)

        def grown() -> str | None:
            broker.send([message(key="k")])
            return sequencer.run_once(connection).grown

        def announced() -> set[str]:
            """What has arrived; the notification of the same session comes last."""
            connection.execute("NOTIFY outbox_queued, 'last'")
            found: set[str] = set()
            while "last" not in found:
                found |= announcements.wait(5)["outbox_queued"]
            return found - {"last"}

        assert grown() == "", "the entries of an earlier leader may not be known"
        [(queue_id,)] = connection.execute("SELECT DISTINCT queue_id FROM outbox.consume_queue").fetchall()
        assert announced() == {""}, "the first tick cannot know it, so it asks the server to notify"
        assert grown() == str(queue_id) and announced() == set()
        assert sequencer.run_once(connection).grown is None
        another_consumer(connection)
        assert grown() == str(queue_id) and announced() == {str(queue_id)}, "although the tick before did not notify"
        connection.execute("UPDATE outbox.consumer SET expires_at = now()")
        assert grown() == str(queue_id) and announced() == {str(queue_id)}
        assert grown() == str(queue_id) and announced() == set()


def test_own_notifications_are_dropped_on_the_channel_that_says_so(
    database: BrokerDatabase, connection: BrokerConnection
) -> None:
    announcements = Announcements(connection, without_own="two")
    connection.execute("LISTEN one; LISTEN two")
    connection.execute("NOTIFY one; NOTIFY two")
    assert set(announcements.wait(5)) == {"one"}
    with database.open(name="other") as other:
        other.autocommit = True
        other.execute("NOTIFY two")
    assert set(announcements.wait(5)) == {"two"}
    connection.execute("NOTIFY one")
    announcements.discard("one")
    assert announcements.wait(0) == {}
