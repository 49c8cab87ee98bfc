"""Periodic passes: one process at a time, and the status names the group whose check-back is absent."""

from __future__ import annotations

import contextlib
from datetime import timedelta

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.postgres import PostgresBroker
from outbox.broker.transaction import checks, turns
from outbox.transaction import Answer, CheckSettings, Decision
from tests.broker.support import half, in_threads

AT_ONCE = CheckSettings(immunity_seconds=0)


def _later(connection: BrokerConnection, seconds: float) -> None:
    """Let time pass for turns and checks."""
    later = {"t": timedelta(seconds=seconds)}
    connection.execute("UPDATE outbox.periodic_pass SET began_at = began_at - %(t)s", later)
    connection.execute("UPDATE outbox.pending_check SET due_at = due_at - %(t)s", later)


def _take(connection: BrokerConnection, group: str = "shop") -> bool:
    return turns.take_turn(Executor(connection, "outbox"), group, turns.CHECK_BACK, interval_seconds=30)


def test_a_pass_rests_for_half_its_interval_per_group(connection: BrokerConnection) -> None:
    assert (_take(connection), _take(connection), _take(connection, "other")) == (True, False, True)
    _later(connection, 14)
    assert not _take(connection)
    _later(connection, 2)
    assert _take(connection)


def test_of_many_at_the_same_moment_one_has_the_turn(database: BrokerDatabase) -> None:
    def take() -> bool:
        with contextlib.closing(database.open(name="test")) as own:
            return _take(own)

    assert sorted(map(bool, in_threads([take] * 8))) == [False] * 7 + [True]


def test_a_time_in_the_future_delays_no_pass(connection: BrokerConnection) -> None:
    """After a failover to a server whose clock is behind."""
    assert _take(connection)
    _later(connection, -3600)
    assert _take(connection)


def _problems(connection: BrokerConnection) -> list[str]:
    return [text for text in map(str, turns.unasked(Executor(connection, "outbox"))) if "check-back" in text]


def test_status_names_the_group_that_no_process_checks(broker: PostgresBroker, connection: BrokerConnection) -> None:
    broker.send_half(half(immunity_seconds=0))
    checks.scan(Executor(connection, "outbox"), settings=AT_ONCE)
    assert _problems(connection) == []
    _later(connection, 100)
    [never] = _problems(connection)
    assert "group 'shop': 1 undecided transactions wait" in never
    assert "which never ran" in never
    assert _take(connection)
    assert _problems(connection) == [], "a pass has begun, and claims what is due"
    _later(connection, 200)
    [stopped] = _problems(connection)
    assert "last ran 200 s ago" in stopped
    answers = [
        Answer(transaction_id=check.transaction_id, decision=Decision.COMMIT) for check in broker.claim_checks("shop")
    ]
    broker.report_answers("shop", answers)
    assert _problems(connection) == []
