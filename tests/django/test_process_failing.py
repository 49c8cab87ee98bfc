"""A process that runs and fails is named: it is never taken for one that is missing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from django.db import IntegrityError, transaction

from outbox.broker.operations.conditions import Condition, Severity
from outbox.contrib.django import publish
from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.django.engine.broker import flush
from outbox.contrib.django.operations.watching import look
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.worker.periodic import passes
from outbox.contrib.django.worker.workers import run_check_role, run_pass
from outbox.errors import BrokerError
from outbox.utils.periodic import PeriodicPass
from tests.django.entry_points import say
from tests.django.processes import child
from tests.django.state import incidents, rolled_back
from tests.support import eventually


def sql(statement: str) -> None:
    with psycopg.connect(alias_conninfo(get_settings().broker), autocommit=True) as connection:
        connection.execute(statement.encode())


def broker_rows(query: str) -> list[Any]:
    with psycopg.connect(alias_conninfo(get_settings().broker), autocommit=True) as connection:
        return connection.execute(query.encode()).fetchall()


@contextlib.contextmanager
def refusing(table: str) -> Iterator[None]:
    """Every row that is written to a table of the broker is refused."""
    sql(f"ALTER TABLE outbox.{table} ADD CONSTRAINT refuses CHECK (false) NOT VALID")
    yield
    sql(f"ALTER TABLE outbox.{table} DROP CONSTRAINT refuses")


def conditions() -> dict[str, Condition]:
    return {one.name: one for one in look().verdict.conditions}


def failing() -> list[tuple[Any, Any]]:
    """The failing parts, and their errors."""
    found = conditions().get("process_failing")
    return [] if found is None else [(fact["failing"], fact["error"]) for fact in found.evidence]


def wait_until_named(part: str, error: str) -> Condition:
    def is_named() -> bool:
        return any(what == part and error in str(said) for what, said in failing())

    eventually(is_named, what=lambda: str(look()))
    return conditions()["process_failing"]


@pytest.mark.slow
def test_a_leader_whose_ticks_fail(databases: None) -> None:
    """It holds the lease at times: with and without it no condition says that a worker is missing."""
    sql("ALTER FUNCTION outbox.make_tick RENAME TO away")
    with child("broker", quiet=True) as process:
        named = wait_until_named("sequencing", "function outbox.make_tick")
        assert named.severity is Severity.CRITICAL
        assert str(process.pid) in str(named.evidence[0]["process"])
        sql("UPDATE outbox.leader_lease SET expires_at = '-infinity'")
        assert "no_sequencer" not in conditions()
        _, said = say("outbox_status")
        assert "process_failing" in said and "Start a worker" not in said
        sql("ALTER FUNCTION outbox.away RENAME TO make_tick")
        eventually(lambda: conditions() == {}, what=lambda: str(look()))
    assert [kind for kind, _ in incidents()] == ["process_failed"]


@pytest.mark.slow
def test_a_leader_whose_lease_is_refused(databases: None) -> None:
    """It never leads, and the lease names no owner."""
    with refusing("leader_lease"), child("broker", quiet=True):
        wait_until_named("sequencing", "leader_lease")
        assert "no_sequencer" not in conditions()


def test_a_consumer_that_cannot_register(databases: None) -> None:
    with refusing("consumer_group"), child("consumer", quiet=True) as process:
        assert process.wait(60) != 0
        wait_until_named("consuming of effects", "refuses")


@pytest.mark.slow
def test_a_consumer_that_cannot_keep_its_leases(databases: None) -> None:
    with child("consumer", quiet=True):
        eventually(lambda: broker_rows("SELECT 1 FROM outbox.consumer"))
    eventually(lambda: not broker_rows("SELECT 1 FROM outbox.consumer"))
    # The grace of an ordinary restart is over.
    sql("UPDATE outbox.queue_lease SET expires_at = expires_at - interval '1 minute'")
    assert "no_worker" in conditions()
    with refusing("consumer"), child("consumer", quiet=True):
        wait_until_named("keeping the leases of effects", "refuses")
        assert "no_worker" not in conditions()


def failed_check_back() -> PeriodicPass:
    """The pass of check-back, after it has failed once in this process."""
    [check_back] = [one for one in passes() if one.name == "check_back"]
    with rolled_back():
        publish("orders", {}, key="half")
    flush(within_seconds=5)
    with refusing("pending_check"):
        run_pass(check_back)
        assert failing()[0][0] == "the pass of check_back, shop"
    return check_back


def test_a_pass_that_fails(databases: None) -> None:
    run_pass(failed_check_back())
    assert failing() == []


def test_a_pass_of_a_process_that_has_ended_does_not_fail(databases: None) -> None:
    """As after a release that mends the pass: the condition would hold for 25 minutes more."""
    failed_check_back()
    stop = threading.Event()
    stop.set()
    run_check_role(stop)
    assert failing() == []


def test_a_process_that_publishes(path: str) -> None:
    """The third refusal in a row is named; the next success ends it."""
    with refusing("commit_log"):
        for number in range(3):
            assert failing() == []
            with pytest.raises((BrokerError, IntegrityError)), transaction.atomic():
                publish("orders", {}, key=str(number))
        assert [what for what, _ in failing()] == ["publishing"]
    with transaction.atomic():
        publish("orders", {}, key="again")
    assert failing() == []


@pytest.mark.slow
def test_a_database_that_is_away_is_no_failure_of_a_process(databases: None) -> None:
    with child("broker", quiet=True):
        eventually(lambda: "no_sequencer" not in conditions())
        sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        publish("orders", {}, key="one", at_once=True)
        eventually(lambda: "no_sequencer" not in conditions())
    assert incidents() == []
