"""The sequencer, one leader at a time: the appended entries, the moments of ticks, the cost."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.leading import FULL_EVERY
from outbox.broker.log import commit_log
from outbox.broker.log.topics import TopicCatalog, declare_topics
from outbox.broker.postgres import PostgresBroker
from outbox.topic import Topic
from tests.broker.support import (
    ANY,
    assert_gapless,
    drain,
    end,
    half,
    message,
    new_sequencer,
    queued,
    queued_ids,
    wire,
)


def _ticks(connection: BrokerConnection) -> int:
    row = connection.execute("SELECT max(tick_id) FROM outbox.tick").fetchone()
    assert row is not None
    return int(row[0])


def test_no_tick_when_nothing_is_new(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    sequencer = new_sequencer(database)
    broker.send([message()])
    assert sequencer.run_once(connection).ticked
    ticks = _ticks(connection)
    assert [sequencer.run_once(connection).ticked for _ in range(3)] == [False] * 3
    broker.send_half(half())
    assert not sequencer.run_once(connection).ticked
    assert _ticks(connection) == ticks


def test_a_tick_is_one_round_trip(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    sequencer = new_sequencer(database)
    sequencer.run_once(connection)
    broker.send([message() for _ in range(50)])
    waiting = half(message("ordered", key="k"))
    with wire(connection) as busy:
        assert sequencer.run_once(connection).appended == 50
    with wire(connection) as idle:
        assert not sequencer.run_once(connection).ticked
    assert (busy.round_trips, idle.round_trips) == (1, 1)
    # Open FIFO work costs one more, to look at its keys in the same snapshot.
    broker.send_half(waiting)
    sequencer.run_once(connection)
    broker.send([message()])
    with wire(connection) as in_order:
        sequencer.run_once(connection)
    assert in_order.round_trips <= 3


def test_messages_are_in_log_order_and_in_the_queue_of_their_shard(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    keys = [f"key-{number % 7}" for number in range(70)]
    sent = [message(key=key) for key in keys]
    for batch in (sent[:30], sent[30:31], sent[31:]):
        broker.send(batch)
    drain(new_sequencer(database), connection)
    positions = {one.message_id: number for number, one in enumerate(sent)}
    by_queue: dict[int, list[int]] = {}
    queues_of_key: dict[str, set[int]] = {}
    for entry in queued(connection):
        by_queue.setdefault(entry.queue_id, []).append(positions[entry.message_id])
        queues_of_key.setdefault(entry.key, set()).add(entry.queue_id)
    assert all(order == sorted(order) for order in by_queue.values())
    assert all(len(queues) == 1 for queues in queues_of_key.values())


def test_messages_without_a_key_are_spread_over_all_queues(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    broker.send([message() for _ in range(40)])
    drain(new_sequencer(database), connection)
    counts: dict[int, int] = {}
    for entry in queued(connection):
        counts[entry.queue_id] = counts.get(entry.queue_id, 0) + 1
    assert sorted(counts.values()) == [10, 10, 10, 10]


def test_a_long_backlog_is_cut_and_nothing_is_skipped(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    sent = [message() for _ in range(300)]
    for number in range(0, 300, 3):
        broker.send(sent[number : number + 3])
    sequencer = new_sequencer(database, batch=20)
    counts = [sequencer.run_once(connection)]
    while counts[-1].more:
        counts.append(sequencer.run_once(connection))
    assert len(counts) >= 10
    assert max(one.appended for one in counts) <= 23
    assert sorted(queued_ids(connection)) == sorted(one.message_id for one in sent)
    assert_gapless(connection)


def test_one_transaction_larger_than_a_batch_is_taken_whole(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    halves = [half() for _ in range(30)]
    for one in halves:
        broker.send_half(one)
    broker.end([end(one.transaction_id) for one in halves])
    broker.send([message()])
    sequencer = new_sequencer(database, batch=10)
    first = sequencer.run_once(connection)
    assert (first.appended, first.more) == (30, True)
    assert sequencer.run_once(connection).appended == 1


def test_a_cut_ignores_ids_of_the_future(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    """Decisions from before a restore may have larger transaction ids; a cut there would skip the next ones."""
    restored = broker.send([message()])
    sequencer = new_sequencer(database, batch=10)
    drain(sequencer, connection)
    connection.execute("UPDATE outbox.op_log SET xid = '900000000'")
    halves = [half() for _ in range(30)]
    for one in halves:
        broker.send_half(one)
    broker.end([end(one.transaction_id) for one in halves])
    assert drain(sequencer, connection).appended == 30
    sent = broker.send([message()])
    drain(sequencer, connection)
    expected = {one.transaction_id for one in halves} | {one.message_id for one in [*restored, *sent]}
    assert set(queued_ids(connection)) == expected


def test_a_transaction_held_open_elsewhere_delays_only_itself(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    sequencer = new_sequencer(database, batch=5)
    catalog = TopicCatalog()
    late = [message(), message()]
    with contextlib.closing(database.open()) as open_elsewhere:
        open_elsewhere.execute("BEGIN")
        commit_log.append_decided(Executor(open_elsewhere, "outbox"), catalog, late)
        others = []
        for _ in range(10):
            others.append(message())
            broker.send([others[-1]])
            drain(sequencer, connection)
            assert others[-1].message_id in queued_ids(connection)
        assert not set(queued_ids(connection)) & {one.message_id for one in late}
        open_elsewhere.execute("COMMIT")
    drain(sequencer, connection)
    assert sorted(queued_ids(connection)) == sorted(one.message_id for one in others + late)
    assert_gapless(connection)


def test_heads_survive_a_change_of_leader_and_the_pruning_of_queues(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    broker.send([message(key="k") for _ in range(5)])
    drain(new_sequencer(database), connection)
    # Retention raises the floor when it removes entries.
    connection.execute(
        "UPDATE outbox.queue SET floor = head FROM outbox.queue_head WHERE queue_head.queue_id = queue.queue_id"
    )
    connection.execute("DELETE FROM outbox.consume_queue")
    broker.send([message(key="k")])
    drain(new_sequencer(database), connection)
    assert [entry.offset for entry in queued(connection)] == [5]


def test_a_full_tick_lists_every_queue(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    broker.send([message(key="a"), message("plain", key="b")])
    drain(new_sequencer(database), connection)
    expected = connection.execute("SELECT queue_id, queue_offset + 1 FROM outbox.consume_queue ORDER BY 1").fetchall()
    # A broker that has ticked often already.
    connection.execute("UPDATE outbox.tick SET tick_id = %s - 1 WHERE tick_id = 1", [FULL_EVERY])
    broker.send([message("plain", key="b")])
    drain(new_sequencer(database), connection)
    row = connection.execute(
        "SELECT queue_ids, heads FROM outbox.tick WHERE is_full AND tick_id = %s", [FULL_EVERY]
    ).fetchone()
    assert row is not None
    (first, one), (second, two) = expected
    heads = dict(zip(*row, strict=True))
    assert heads in ({first: one + 1, second: two}, {first: one, second: two + 1})
    # The ticks before it are not needed any more.
    connection.execute("DELETE FROM outbox.tick WHERE tick_id < %s", [FULL_EVERY])
    broker.send([message(key="a")])
    drain(new_sequencer(database), connection)
    assert_gapless(connection)


def test_changing_the_queue_count_closes_the_old_queues_at_their_final_heads(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    sequencer = new_sequencer(database)
    broker.send([message() for _ in range(8)])
    drain(sequencer, connection)
    declare_topics(Executor(connection, "outbox"), [Topic(name="orders", types=ANY, queue_count=2)])
    broker.send([message() for _ in range(8)])
    drain(sequencer, connection)
    rows = connection.execute(
        "SELECT q.layout, closed_at, (SELECT count(*) FROM outbox.consume_queue e WHERE e.queue_id = q.queue_id)"
        " FROM outbox.queue q JOIN outbox.topic USING (topic_id) WHERE name = 'orders' ORDER BY q.queue_id"
    ).fetchall()
    assert rows == [(1, 2, 2)] * 4 + [(2, None, 4)] * 2


def test_a_position_dies_with_its_connection(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    sequencer = new_sequencer(database)
    broker.send([message()])
    drain(sequencer, connection)
    with contextlib.closing(database.open()) as doomed:
        sequencer.run_once(doomed)
        connection.execute("SELECT pg_terminate_backend(%s)", [doomed.info.backend_pid])
        broker.send([message()])
        with pytest.raises(psycopg.OperationalError):
            sequencer.run_once(doomed)
    assert sequencer.run_once(connection).appended == 1
    assert_gapless(connection)


# -- the sequencer and delivery times: a delayed message is queued when it is due, or recalled  --


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
