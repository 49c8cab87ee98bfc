"""The counted cost of a tick: statements, round trips, rows read. It grows with new rows, not with stored ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.database.notify import Announcements, Channel, listen
from outbox.broker.leading import Sequencer
from outbox.broker.log.topics import declare_topics
from outbox.broker.postgres import PostgresBroker
from outbox.topic import Topic
from tests.broker.support import ANY, another_consumer, drain, end, half, message, new_sequencer, wire

# The rows that a tick reads, without the few topics and queues of a test.
READ = ("op_log", "commit_log", "consume_queue", "scheduled", "held", "tick", "pending_check")


def still() -> float:
    """A clock that stands still: a tick reads more rows when a key has waited for a second, or every ten seconds."""
    return 0.0


def _read(connection: BrokerConnection) -> tuple[int, int]:
    """Sequential scans of those tables, and rows read from them, that other connections have flushed."""
    row = connection.execute(
        "SELECT sum(seq_scan)::bigint, sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::bigint"
        " FROM pg_stat_user_tables WHERE relname = ANY (%s)",
        [list(READ)],
    ).fetchone()
    assert row is not None
    return int(row[0]), int(row[1])


def _cost(sequencer: Sequencer, ticking: BrokerConnection, work: Callable[[], object]) -> tuple[int, int]:
    """Scans and rows that one tick reads for the work."""
    work()
    # The counters of a session are read by others once it has flushed them.
    ticking.execute("SELECT pg_stat_force_next_flush()")
    with contextlib.closing(psycopg.connect(ticking.info.dsn, autocommit=True)) as reader:
        before = _read(reader)  # type: ignore[arg-type]
        assert sequencer.run_once(ticking).ticked
        ticking.execute("SELECT pg_stat_force_next_flush()")
        after = _read(reader)  # type: ignore[arg-type]
    return after[0] - before[0], after[1] - before[1]


@pytest.fixture
def ticking(database: BrokerDatabase) -> BrokerConnection:
    """The sequencer's connection: its plans are made before the tables grow."""
    return database.open(name="ticking")


@pytest.mark.parametrize("topic", ["orders", "ordered"])
def test_a_tick_reads_only_what_is_new(
    topic: str,
    broker: PostgresBroker,
    database: BrokerDatabase,
    connection: BrokerConnection,
    ticking: BrokerConnection,
) -> None:
    """Also with plans that were made on empty tables, on tables that have grown since and were never analysed."""
    with contextlib.closing(ticking):
        for table in READ:
            connection.execute(f"ALTER TABLE outbox.{table} SET (autovacuum_enabled = off)".encode())
        sequencer = new_sequencer(database, clock=still)
        sequencer.run_once(ticking)

        def one() -> None:
            broker.send([message(topic, key="k")])

        for _ in range(7):
            small = _cost(sequencer, ticking, one)
        blocker = half(message("ordered", key="held"))
        broker.send_half(blocker)
        broker.send([message("ordered", key="held") for _ in range(500)], timeout_seconds=60)
        later = datetime.now(UTC) + timedelta(hours=1)
        broker.send([message(deliver_at=later) for _ in range(500)], timeout_seconds=60)
        for _ in range(10):
            broker.send([message() for _ in range(500)], timeout_seconds=60)
        drain(sequencer, ticking)
        drain(sequencer, ticking)
        _cost(sequencer, ticking, one)
        large = _cost(sequencer, ticking, one)
        assert (small[0], large[0]) == (0, 0), "sequential scans"
        assert large[1] <= small[1] + 10, "rows"


def test_a_tick_touches_only_the_queues_it_appends_to(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    many = [Topic(name=f"many-{number}", types=ANY, queue_count=100) for number in range(10)]
    declare_topics(Executor(connection, "outbox"), many)
    broker.declare(many)
    for topic in many:
        broker.send([message(topic.name) for _ in range(100)])
    sequencer = new_sequencer(database, clock=still)
    drain(sequencer, connection)
    broker.send([message("plain", key="k")])
    with wire(connection) as wired:
        sequencer.run_once(connection)
    assert sum(map(len, wired.lines)) < 4000, "the bytes of a tick do not grow with the number of queues"


def test_held_keys_cost_nothing_in_a_tick_without_fifo_messages(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    blockers = [half(message("ordered", key=f"key-{number}")) for number in range(20)]
    for one in blockers:
        broker.send_half(one)
    broker.send([message("ordered", key=f"key-{number}") for number in range(20)])
    sequencer = new_sequencer(database, clock=still)
    assert drain(sequencer, connection).held == 20
    # The next tick looks once more: it checks whether a blocker is parked, and finds no other FIFO message.
    sequencer.run_once(connection)
    broker.send([message("plain", key="k")])
    with wire(connection) as wired:
        assert sequencer.run_once(connection).appended == 1
    assert wired.round_trips == 1
    broker.end([end(one.transaction_id) for one in blockers])
    drain(sequencer, connection)
    assert connection.execute("SELECT count(*) FROM outbox.held").fetchone() == (0,)


def test_fifo_messages_of_free_keys_are_appended_without_a_look_at_what_waits(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    blocker = half(message("ordered", key="held"))
    broker.send_half(blocker)
    broker.send([message("ordered", key="held")])
    sequencer = new_sequencer(database, clock=still)
    assert drain(sequencer, connection).held == 1
    sequencer.run_once(connection)
    broker.send([message("ordered", key="free")])
    assert sequencer.run_once(connection).appended == 1, "the first one is looked at"
    for _ in range(3):
        sequencer.run_once(connection)
        broker.send([message("ordered", key="free")])
        with wire(connection) as wired:
            assert sequencer.run_once(connection).appended == 1
        assert (wired.round_trips, wired.statements) == (2, 3)
    # Messages of a key that waits are still looked at.
    broker.send([message("ordered", key="held"), message("ordered", key="free")])
    counts = sequencer.run_once(connection)
    assert (counts.appended, counts.held) == (1, 1)
    sequencer.run_once(connection)
    broker.send([message("ordered", key="free")])
    sequencer.run_once(connection)
    broker.end([end(blocker.transaction_id)])
    counts = sequencer.run_once(connection)
    assert (counts.appended, counts.released) == (3, 2)
    assert connection.execute("SELECT count(*) FROM outbox.held").fetchone() == (0,)


def test_looking_for_parked_blockers_reads_no_others(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection, ticking: BrokerConnection
) -> None:
    with contextlib.closing(ticking):
        for number in range(100):
            broker.send_half(half(message("ordered", key=f"key-{number}")))
        broker.send([message("ordered", key=f"key-{number}") for number in range(100)])
        sequencer = new_sequencer(database, clock=still)
        assert drain(sequencer, ticking).held == 100
        connection.execute(
            "INSERT INTO outbox.pending_check (transaction_id, log_id, producer_group, stored_at, immune_until, due_at)"
            " SELECT transaction_id, log_id, 'shop', now(), now(), now() FROM outbox.commit_log WHERE half"
            " ON CONFLICT DO NOTHING"
        )
        sequencer.run_once(ticking)
        assert sequencer._state is not None
        sequencer._state.look_at_all_parked_at = 0.0
        _, rows = _cost(sequencer, ticking, lambda: broker.send([message()]))
        assert rows < 50


def test_a_tick_stays_committed_when_its_announcement_is_refused(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    """As with a full notification queue, which one idle transaction that listens can cause."""
    connection.execute(
        "CREATE FUNCTION public.pg_notify(text, text) RETURNS void LANGUAGE plpgsql AS $$ BEGIN RAISE 'full'; END $$"
    )
    connection.execute("SET search_path = public, pg_catalog")
    sequencer = new_sequencer(database, clock=still)
    another_consumer(connection)
    with pytest.raises(psycopg.errors.RaiseException):
        connection.execute("SELECT pg_notify('outbox_queued', '')")
    for _ in range(3):
        broker.send([message()])
        assert sequencer.run_once(connection).appended == 1
    connection.execute("RESET search_path")
    with contextlib.closing(database.open()) as consumer:
        listen(Executor(consumer, "outbox"), Channel.QUEUED)
        announcements = Announcements(consumer)
        broker.send([message()])
        sequencer.run_once(connection)
        assert announcements.wait(10) == {"outbox_queued": {""}}, "the next tick announces for those that were refused"
