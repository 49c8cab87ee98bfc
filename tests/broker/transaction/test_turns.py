"""Periodic passes: one process at a time."""

from __future__ import annotations

import contextlib
from datetime import timedelta

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.transaction import turns
from tests.broker.support import in_threads


def _later(connection: BrokerConnection, seconds: float) -> None:
    connection.execute("UPDATE outbox.periodic_pass SET began_at = began_at - %(t)s", {"t": timedelta(seconds=seconds)})


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


def test_a_service_forgets_the_passes_that_it_has_no_longer(connection: BrokerConnection) -> None:
    run = Executor(connection, "outbox")
    for group, name in (("shop", "sagas"), ("shop", "receive:partner"), ("other", "sagas"), ("shop", turns.CHECK_BACK)):
        turns.take_turn(run, group, name, interval_seconds=30)
    turns.forget_others(run, "shop", [turns.CHECK_BACK])
    assert _names(connection) == {"check_back", "receive:partner", "sagas"}, "a process may have the part still"
    _later(connection, 301)
    turns.forget_others(run, "shop", [turns.CHECK_BACK])
    assert _names(connection) == {"check_back", "receive:partner"}


def _names(connection: BrokerConnection, group: str = "shop") -> set[str]:
    rows = connection.execute("SELECT name FROM outbox.periodic_pass WHERE producer_group = %s", [group]).fetchall()
    return {name for (name,) in rows}
