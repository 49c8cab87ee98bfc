"""Restore and failover, retention, the status with its conservation, and traces."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.log import incidents
from outbox.broker.maintenance import retention, service
from outbox.broker.maintenance.retention import RetentionSettings
from outbox.broker.operations.audit import MessageCounts, count_messages
from outbox.broker.postgres import PostgresBroker
from outbox.broker.transaction import checks
from outbox.transaction import Answer, CheckSettings, Decision
from tests.broker.support import (
    assert_gapless,
    drain,
    end,
    half,
    let_time_pass,
    message,
    new_sequencer,
    queued,
    queued_ids,
)

# -- restore, upgrade, failover --------------------------------------------------------------------------------

_CHANGES: dict[str, str] = {
    "another server": "UPDATE outbox.broker SET system_identifier = '1'",
    "another timeline": "UPDATE outbox.broker SET timeline = timeline + 7",
    "transaction ids in the future": "UPDATE outbox.tick SET snapshot = '900000000:900000000:'"
    " WHERE tick_id = (SELECT max(tick_id) FROM outbox.tick)",
}


@pytest.mark.parametrize("change", _CHANGES)
def test_resynchronisation_after(
    change: str, broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    """No message is lost or doubled, also if it was decided but unread, scheduled or held when the ids started over."""
    open_half, blocker, behind = half(), half(message("ordered", key="k")), half(message("ordered", key="k"))
    before = [message() for _ in range(3)]
    later = message(deliver_at=datetime.now(UTC) + timedelta(hours=1))
    broker.send([*before, later])
    for one in (open_half, blocker, behind):
        broker.send_half(one)
    broker.end([end(behind.transaction_id)])
    drain(new_sequencer(database), connection)
    unread = [message() for _ in range(3)]
    broker.send(unread)
    # Earlier ids: as if a server that had counted further had written the log.
    connection.execute("UPDATE outbox.commit_log SET xid = '800000000' WHERE half")
    connection.execute("UPDATE outbox.op_log SET xid = '800000001'")
    connection.execute(_CHANGES[change].encode())

    sequencer = new_sequencer(database)
    drain(sequencer, connection)
    assert sorted(queued_ids(connection)) == sorted(one.message_id for one in before + unread)
    assert connection.execute("SELECT incarnation FROM outbox.broker").fetchone() == (2,)
    broker.end([end(open_half.transaction_id), end(blocker.transaction_id)])
    after = [message() for _ in range(3)]
    broker.send(after)
    drain(sequencer, connection)
    drain(new_sequencer(database), connection)
    expected = [*before, *unread, *after, *open_half.messages, *blocker.messages, *behind.messages]
    assert sorted(queued_ids(connection)) == sorted(one.message_id for one in expected)
    assert queued_ids(connection, "ordered") == [blocker.transaction_id, behind.transaction_id]
    assert connection.execute("SELECT incarnation FROM outbox.broker").fetchone() == (2,), "once"
    new = half()
    broker.send_half(new)
    checks.scan(Executor(connection, "outbox"), settings=CheckSettings())
    pending = {row[0] for row in connection.execute("SELECT transaction_id FROM outbox.pending_check")}
    assert new.transaction_id in pending, "the half scan continues in the new incarnation"
    assert broker.recall([later.message_id])[0].is_recalled
    assert_gapless(connection)


# -- retention ---------------------------------------------------------------------------------------------------


def _subscribe(connection: BrokerConnection, topic: str) -> None:
    connection.execute("INSERT INTO outbox.consumer_group (name) VALUES ('readers')")
    connection.execute(
        "INSERT INTO outbox.subscription (group_id, topic_id, mode)"
        " SELECT group_id, topic_id, 'concurrent' FROM outbox.consumer_group, outbox.topic t WHERE t.name = %s",
        [topic],
    )


def _consume(connection: BrokerConnection, *, ordinal: int = 1, short_of_the_end: int = 0) -> None:
    connection.execute(
        "INSERT INTO outbox.consumer_offset (group_id, queue_id, epoch, ordinal, start_offset, next_offset, handled)"
        " SELECT group_id, queue_id, 1, %(ordinal)s, 0, greatest(0, n - %(short)s), greatest(0, n - %(short)s)"
        " FROM (SELECT queue_id, max(queue_offset) + 1 AS n FROM outbox.consume_queue GROUP BY 1) q,"
        " outbox.consumer_group",
        {"ordinal": ordinal, "short": short_of_the_end},
    )


def _age(connection: BrokerConnection, days: float) -> None:
    interval = timedelta(days=days)
    connection.execute("UPDATE outbox.commit_log SET stored_at = stored_at - %s", [interval])
    connection.execute("UPDATE outbox.consume_queue SET queued_at = queued_at - %s", [interval])
    connection.execute("UPDATE outbox.op_log SET decided_at = decided_at - %s", [interval])
    connection.execute("UPDATE outbox.recalled SET recalled_at = recalled_at - %s", [interval])


def _count(connection: BrokerConnection, table: str) -> int:
    row = connection.execute(f"SELECT count(*) FROM outbox.{table}".encode()).fetchone()
    assert row is not None
    return int(row[0])


def _clean(connection: BrokerConnection, **settings: float) -> retention.RetentionCounts:
    last = retention.RetentionCounts()
    for _ in range(100):
        found = retention.run_once(Executor(connection, "outbox"), settings=RetentionSettings(batch=3, **settings))
        if not found.more:
            return found
        last = found
    return last


def _balanced(connection: BrokerConnection) -> MessageCounts:
    counted = count_messages(Executor(connection, "outbox"))
    assert counted.differences() == []
    return counted


def test_retention_removes_what_is_old_and_consumed_and_totals_stay(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    _subscribe(connection, "orders")
    rolled_back, undecided = half(), half(message(), message())
    broker.send_half(rolled_back)
    broker.send_half(undecided)
    broker.end([end(rolled_back.transaction_id, Decision.ROLLBACK)])
    broker.send([message() for _ in range(20)])
    drain(new_sequencer(database), connection)
    before = _balanced(connection)
    _consume(connection)
    _clean(connection)
    assert _count(connection, "commit_log") == 23, "consumed, but not old"
    _age(connection, 4)
    _clean(connection)
    assert (_count(connection, "commit_log"), _count(connection, "op_log")) == (2, 0), "the undecided half stays"
    assert _count(connection, "consume_queue") == 0
    after = _balanced(connection)
    assert after.topics == before.topics
    assert [(group.queued, group.handled) for group in after.groups.values()] == [(20, 20)]
    # Offsets continue where they were.
    broker.send([message() for _ in range(8)])
    drain(new_sequencer(database), connection)
    assert {entry.offset for entry in queued(connection)} >= {5, 6}


def test_retention_keeps_what_a_group_has_not_consumed_up_to_the_hard_cap(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    _subscribe(connection, "orders")
    broker.send([message() for _ in range(20)])
    drain(new_sequencer(database), connection)
    _consume(connection, short_of_the_end=2)
    _age(connection, 4)
    _clean(connection)
    assert _count(connection, "consume_queue") == 8
    _age(connection, 40)
    _clean(connection)
    assert _count(connection, "consume_queue") == 0
    assert "expired" in {one.kind for one in incidents.recent(Executor(connection, "outbox"))}


@pytest.mark.parametrize(("behind", "left"), [(0, 0), (20, 20)])
def test_messages_of_a_clock_that_was_ahead_keep_nothing_behind_them(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection, behind: int, left: int
) -> None:
    _subscribe(connection, "orders")
    broker.send([message() for _ in range(20)])
    drain(new_sequencer(database), connection)
    _consume(connection, short_of_the_end=behind)
    first = "SELECT min(log_id) FROM outbox.consume_queue GROUP BY queue_id"
    connection.execute(f"UPDATE outbox.commit_log SET stored_at = 'infinity' WHERE log_id IN ({first})".encode())
    connection.execute(f"UPDATE outbox.consume_queue SET queued_at = 'infinity' WHERE log_id IN ({first})".encode())
    _clean(connection)
    assert _count(connection, "commit_log") == 20, "the messages behind them are young"
    _age(connection, 4)
    _clean(connection)
    assert _count(connection, "commit_log") == left
    _age(connection, 40)
    _clean(connection)
    assert _count(connection, "commit_log") == 0


def test_a_clock_that_is_behind_removes_nothing(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    _subscribe(connection, "orders")
    broker.send([message() for _ in range(20)])
    drain(new_sequencer(database), connection)
    _consume(connection)
    _age(connection, -400)
    _clean(connection)
    assert _count(connection, "commit_log") == 20


def test_the_hard_cap_counts_from_when_a_message_could_be_consumed(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    """A message delayed, or undecided, for longer than the cap is not removed as soon as it is queued."""
    _subscribe(connection, "orders")
    delayed, late = message(deliver_at=datetime.now(UTC) + timedelta(hours=1)), half()
    broker.send([delayed])
    broker.send_half(late)
    drain(new_sequencer(database), connection)
    _age(connection, 40)
    connection.execute("UPDATE outbox.commit_log SET deliver_at = now() WHERE deliver_at IS NOT NULL")
    connection.execute("UPDATE outbox.scheduled SET due_at = now()")
    broker.end([end(late.transaction_id)])
    drain(new_sequencer(database), connection)
    _clean(connection)
    assert set(queued_ids(connection)) == {delayed.message_id, late.transaction_id}


def test_retention_leaves_a_rollback_until_the_sequencer_has_read_it(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    """Else the key of an old parked message would stay held."""
    blocker, behind = half(message("ordered", key="k")), half(message("ordered", key="k"))
    broker.send_half(blocker)
    broker.send_half(behind)
    broker.end([end(behind.transaction_id)])
    sequencer = new_sequencer(database)
    assert drain(sequencer, connection).held == 1
    _age(connection, 4)
    broker.end([end(blocker.transaction_id, Decision.ROLLBACK)])
    _clean(connection)
    drain(sequencer, connection)
    assert queued_ids(connection) == [behind.transaction_id]
    _clean(connection)
    assert _count(connection, "commit_log") == 1


@pytest.mark.parametrize(("seconds", "passes"), [(60.0, 1), (0.0, 5)])
def test_a_topic_that_keeps_rollbacks_for_long_keeps_none_of_other_topics(
    seconds: float, passes: int, broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    """Nor messages that were recalled. A pass goes on while it finds full batches, but not for longer than it may."""
    connection.execute("UPDATE outbox.topic SET retention_seconds = 1e8 WHERE name = 'ordered'")
    later = datetime.now(UTC) + timedelta(hours=1)
    for topic in ("ordered", "orders"):
        for _ in range(7):
            one = half(message(topic, key="k"))
            broker.send_half(one)
            broker.end([end(one.transaction_id, Decision.ROLLBACK)])
    delayed = [message("orders", deliver_at=later) for _ in range(14)]
    broker.send(delayed)
    drain(new_sequencer(database), connection)
    broker.recall([one.message_id for one in delayed])
    connection.execute(
        "UPDATE outbox.commit_log SET topic_id = (SELECT topic_id FROM outbox.topic WHERE name = 'ordered')"
        " WHERE message_id = ANY (%s)",
        [[one.message_id for one in delayed[:7]]],
    )
    _age(connection, 4)
    place = retention.UnqueuedPlace()
    kept = "SELECT name, count(*) FROM outbox.commit_log JOIN outbox.topic USING (topic_id) GROUP BY 1 ORDER BY 1"
    settings = RetentionSettings(batch=3, unqueued_seconds=seconds)
    for _ in range(passes):
        assert connection.execute(kept.encode()).fetchall() != [("ordered", 14)]
        retention.run_once(Executor(connection, "outbox"), settings=settings, place=place)
    assert connection.execute(kept.encode()).fetchall() == [("ordered", 14)]
    assert place == retention.UnqueuedPlace(), "the next pass begins again"


def test_retention_keeps_what_is_dead_and_removes_it_afterwards(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    _subscribe(connection, "orders")
    receipts = broker.send([message() for _ in range(6)])
    drain(new_sequencer(database), connection)
    _consume(connection)
    connection.execute(
        "INSERT INTO outbox.dead_letter (group_id, log_id, attempts, error)"
        " SELECT group_id, %s, 16, 'x' FROM outbox.consumer_group",
        [receipts[0].position],
    )
    _age(connection, 4)
    _clean(connection)
    assert queued_ids(connection) == [receipts[0].message_id]
    # A restored broker would not deliver it again: its entry proves that it was queued.
    connection.execute("UPDATE outbox.broker SET timeline = timeline + 1")
    drain(new_sequencer(database), connection)
    assert queued_ids(connection) == [receipts[0].message_id]
    connection.execute("UPDATE outbox.dead_letter SET replayed_at = now()")
    _clean(connection)
    assert _count(connection, "commit_log") == _count(connection, "dead_letter") == 0


def test_retention_trims_offsets_but_never_the_newest(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    _subscribe(connection, "orders")
    broker.send([message() for _ in range(8)])
    drain(new_sequencer(database), connection)
    for ordinal in range(1, 6):
        _consume(connection, ordinal=ordinal)
    _clean(connection)
    rows = connection.execute("SELECT DISTINCT ordinal, count(*) FROM outbox.consumer_offset GROUP BY 1").fetchall()
    assert rows == [(5, 4)]


def test_a_leader_that_slept_while_ticks_were_pruned_notices(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    sleeper, other = new_sequencer(database), new_sequencer(database)
    broker.send([message()])
    drain(sleeper, connection)
    with database.connect() as own:
        for _ in range(3):
            broker.send([message()])
            other.run_once(own)
    # The next tick's number is free again, because retention removed the row.
    connection.execute(
        "UPDATE outbox.tick SET is_full = true, queue_ids = h.q, heads = h.h FROM ("
        " SELECT array_agg(queue_id) q, array_agg(n) h FROM (SELECT queue_id, max(queue_offset) + 1 n"
        " FROM outbox.consume_queue GROUP BY 1) x) h"
        " WHERE tick_id = (SELECT max(tick_id) FROM outbox.tick)"
    )
    assert _clean(connection).ticks >= 0
    assert _count(connection, "tick") == 1
    assert sleeper.run_once(connection).collided
    broker.send([message()])
    drain(sleeper, connection)
    assert len(queued_ids(connection)) == len(set(queued_ids(connection))) == 5
    assert_gapless(connection)


# -- status --------------------------------------------------------------------------------------------------------


def test_conservation_counts_every_state_from_its_own_rows(
    database: BrokerDatabase, connection: BrokerConnection
) -> None:
    broker = PostgresBroker(database, check=CheckSettings(immunity_seconds=0, max_checks=1))
    parked = half()
    broker.send_half(parked)
    broker.claim_checks("shop")
    broker.report_answers("shop", [Answer(transaction_id=parked.transaction_id, decision=Decision.UNKNOWN)])
    undecided, rolled_back, blocker, behind = half(), half(), *(half(message("ordered", key="k")) for _ in range(2))
    for one in (undecided, rolled_back, blocker, behind):
        broker.send_half(one)
    broker.end([end(rolled_back.transaction_id, Decision.ROLLBACK), end(behind.transaction_id)])
    delayed = [message(deliver_at=datetime.now(UTC) + timedelta(hours=1)) for _ in range(3)]
    broker.send([message(), *delayed])
    drain(new_sequencer(database), connection)
    broker.recall([delayed[0].message_id])
    broker.send([message(), message()])
    counted = _balanced(connection)
    orders, ordered = (counted.topics[name] for name in ("orders", "ordered"))
    assert (orders.sent, orders.committed, orders.rolled_back, orders.undecided, orders.parked) == (9, 6, 1, 1, 1)
    assert (orders.unsequenced, orders.scheduled, orders.recalled, orders.queued) == (2, 2, 1, 1)
    assert (ordered.undecided, ordered.committed, ordered.held) == (1, 1, 1)
    broker.close()


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ("DELETE FROM outbox.consume_queue WHERE queue_offset = 0", "queued"),
        ("DELETE FROM outbox.commit_log WHERE log_id = 1", "sent|queued"),
        ("INSERT INTO outbox.consume_queue SELECT queue_offset + 100, log_id, queue_id, 0 FROM outbox.consume_queue"
         " LIMIT 1", "queued"),
        ("UPDATE outbox.consumer_offset SET handled = handled + 1 WHERE next_offset > 0", "handled"),
        ("UPDATE outbox.op_log SET decision = 'X'", "4 sent, but 0 committed"),
    ],
)  # fmt: skip
def test_control_the_audit_notices(
    damage: str, complaint: str, broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    _subscribe(connection, "orders")
    broker.send([message() for _ in range(4)])
    drain(new_sequencer(database), connection)
    _consume(connection)
    _balanced(connection)
    connection.execute(damage.encode())
    problems = count_messages(Executor(connection, "outbox")).differences()
    assert re.search(complaint, " ".join(problems))


def test_a_publication_of_all_tables_stops_no_pass(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    """Debezium makes one by default. PostgreSQL then refuses changes of tables without a replica identity."""
    connection.execute("CREATE PUBLICATION everything FOR ALL TABLES")
    sent = broker.send([message() for _ in range(3)])
    drain(new_sequencer(database), connection)
    connection.execute("UPDATE outbox.commit_log SET stored_at = now() - interval '1 year'")
    retention.run_once(Executor(connection, "outbox"))
    assert len(queued_ids(connection)) == len(sent)
    without = """
        SELECT relname FROM pg_class WHERE relnamespace = 'outbox'::regnamespace AND relkind IN ('r', 'p')
        AND relpersistence = 'p' AND relreplident = 'd'
        AND NOT EXISTS (SELECT FROM pg_index WHERE indrelid = pg_class.oid AND indisprimary)
    """
    assert connection.execute(without.encode()).fetchall() == []


# -- retention of recalled messages --


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


# -- times that were written while the server's clock was ahead --


YEARS = 74 * 365 * 86_400.0


def test_undecided_transactions_and_retries_count_from_now(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    """Otherwise nothing would check or deliver them in our lifetime, and no page would say why."""
    ahead, later = half(immunity_seconds=60), message(deliver_at=datetime.now(UTC) + timedelta(days=70 * 365))
    broker.send([later, message()])
    drain(new_sequencer(database), connection)
    broker.send_half(ahead)
    checks.scan(Executor(connection, "outbox"), settings=CheckSettings())
    connection.execute(
        "UPDATE outbox.pending_check SET stored_at = stored_at + %(t)s, immune_until = immune_until + %(t)s,"
        " due_at = due_at + %(t)s",
        {"t": timedelta(seconds=YEARS)},
    )
    connection.execute(
        "INSERT INTO outbox.scheduled (log_id, due_at, queue_id, attempt)"
        " SELECT log_id, now() + %s, (SELECT min(queue_id) FROM outbox.queue), 1 FROM outbox.commit_log"
        " WHERE NOT half AND deliver_at IS NULL",
        [timedelta(seconds=YEARS)],
    )
    settled = half(immunity_seconds=60)
    broker.send_half(settled)
    for _ in range(2):
        service.run_once(database, CheckSettings())
    found = [one for one in incidents.recent(Executor(connection, "outbox")) if one.kind == "clock"]
    assert [one.subject for one in found] == ["retries", "undecided transactions"]
    assert all(one.detail.startswith("1 rows had times in the future, up to ") for one in found)
    due = "SELECT queue_id IS NOT NULL FROM outbox.scheduled WHERE due_at <= now()"
    assert connection.execute(due.encode()).fetchall() == [(True,)], "a message may be delayed for as long as it likes"
    assert broker.claim_checks("shop") == [], "the immunity begins anew"
    let_time_pass(connection, 61)
    claimed = broker.claim_checks("shop")
    assert {one.transaction_id for one in claimed} == {ahead.transaction_id, settled.transaction_id}
    assert all(one.may_write for one in claimed)
