"""Parking: by answers that count, or by age; a parked transaction is asked about again, and is not decided."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from uuid import UUID

import pytest

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.log import incidents
from outbox.broker.maintenance import service
from outbox.broker.operations.conditions import Fact
from outbox.broker.operations.rules import survey
from outbox.broker.operations.summary import read as read_summary
from outbox.broker.operations.trace import trace
from outbox.broker.postgres import PostgresBroker
from outbox.broker.transaction import checks, parking
from outbox.transaction import Answer, Check, CheckSettings, Decision, EndStatus, HalfTransaction, ParkReason
from tests.broker.support import end, half, let_time_pass

NOW = CheckSettings(immunity_seconds=0, recheck_seconds=0)
THREE_DAYS, HOUR = 72 * 3600, 3600


@pytest.fixture
def at_once(database: BrokerDatabase) -> Iterator[PostgresBroker]:
    """A broker without immunity and recheck time; a process of the group has asked before."""
    broker = PostgresBroker(database, check=NOW)
    broker.claim_checks("shop")
    yield broker
    broker.close()


@pytest.fixture
def another(database: BrokerDatabase) -> Iterator[PostgresBroker]:
    """Another process of the same group."""
    broker = PostgresBroker(database, check=NOW)
    yield broker
    broker.close()


def answer(found: Sequence[Check], *, counts: bool = True, detail: str = "") -> list[Answer]:
    return [
        Answer(transaction_id=one.transaction_id, decision=Decision.UNKNOWN, counts=counts, detail=detail)
        for one in found
    ]


def park(connection: BrokerConnection) -> int:
    return parking.park_overdue(Executor(connection, "outbox"), settings=NOW)


def parked(connection: BrokerConnection) -> dict[UUID, str]:
    rows = connection.execute(
        "SELECT transaction_id, park_reason FROM outbox.pending_check WHERE parked_at IS NOT NULL"
    ).fetchall()
    return dict(rows)


def parked_by_checks(broker: PostgresBroker) -> HalfTransaction:
    one = half()
    broker.send_half(one)
    for _ in range(NOW.max_checks):
        broker.report_answers("shop", answer(broker.claim_checks("shop"), detail="the look-up is not there"))
    return one


def asked(broker: PostgresBroker, group: str = "shop") -> list[UUID]:
    return [check.transaction_id for check in broker.claim_checks(group)]


def test_maintenance_parks_halves_without_an_answer_and_names_the_group(
    database: BrokerDatabase, at_once: PostgresBroker, connection: BrokerConnection
) -> None:
    one = half(group="switched off")
    at_once.send_half(one)
    checks.scan(Executor(connection, "outbox"), settings=NOW)
    let_time_pass(connection, THREE_DAYS + HOUR)
    service.run_once(database, NOW)
    assert parked(connection) == {one.transaction_id: ParkReason.UNANSWERED}
    [incident] = incidents.recent(Executor(connection, "outbox"))
    assert (incident.kind, incident.subject) == ("parked", str(one.transaction_id))
    assert incident.detail.startswith("unanswered: no producer of group 'switched off' has asked for checks ever")
    assert park(connection) == 0, "once"
    # A process of the group starts later: checked at once, and no check is used up.
    [check] = at_once.claim_checks("switched off")
    assert (check.transaction_id, check.checks) == (one.transaction_id, 0)


def test_maintenance_parks_halves_that_stay_unknown_and_names_the_last_answer(
    at_once: PostgresBroker, connection: BrokerConnection
) -> None:
    one = half()
    at_once.send_half(one)
    at_once.report_answers("shop", answer(at_once.claim_checks("shop"), counts=False, detail="still running"))
    let_time_pass(connection, THREE_DAYS + 1)
    assert asked(at_once) == [one.transaction_id]
    assert park(connection) == 1
    assert parked(connection) == {one.transaction_id: ParkReason.AGE}
    assert "still running" in incidents.recent(Executor(connection, "outbox"))[0].detail
    assert asked(at_once) == [], "checked a moment ago"


def test_a_transaction_with_a_long_immunity_is_not_parked_by_its_age(
    at_once: PostgresBroker, connection: BrokerConnection
) -> None:
    patient = half(immunity_seconds=100 * HOUR)
    at_once.send_half(patient)
    checks.scan(Executor(connection, "outbox"), settings=NOW)
    let_time_pass(connection, 99 * HOUR)
    assert park(connection) == 0
    let_time_pass(connection, HOUR + THREE_DAYS + 1)
    assert park(connection) == 1


def test_past_the_limits_it_is_parked_and_a_late_end_still_decides(
    at_once: PostgresBroker, connection: BrokerConnection
) -> None:
    one = parked_by_checks(at_once)
    assert asked(at_once) == []
    assert parked(connection) == {one.transaction_id: ParkReason.CHECKS}
    [incident] = incidents.recent(Executor(connection, "outbox"))
    assert (incident.kind, incident.subject) == ("parked", str(one.transaction_id))
    assert at_once.end([end(one.transaction_id)]) == [EndStatus.APPLIED]
    assert parked_facts(Executor(connection, "outbox")) == []


def test_an_answer_that_does_not_count_never_parks(at_once: PostgresBroker, connection: BrokerConnection) -> None:
    at_once.send_half(half())
    for _ in range(NOW.max_checks + 2):
        at_once.report_answers("shop", answer(at_once.claim_checks("shop"), counts=False))
    let_time_pass(connection, 100)
    park(connection)
    assert parked(connection) == {}


def test_a_parked_one_is_asked_hourly_and_when_its_group_comes_back(
    at_once: PostgresBroker, connection: BrokerConnection
) -> None:
    one = parked_by_checks(at_once)
    assert asked(at_once) == []
    let_time_pass(connection, HOUR)
    [check] = at_once.claim_checks("shop")
    assert (check.transaction_id, check.checks) == (one.transaction_id, NOW.max_checks)
    for _ in range(2):
        let_time_pass(connection, 200)
        assert asked(at_once) == []
    let_time_pass(connection, 400)
    assert asked(at_once) == [one.transaction_id], "its group came back"


def test_a_decided_transaction_is_not_parked(at_once: PostgresBroker, connection: BrokerConnection) -> None:
    one = half()
    at_once.send_half(one)
    checks.scan(Executor(connection, "outbox"), settings=NOW)
    at_once.end([end(one.transaction_id)])
    let_time_pass(connection, THREE_DAYS + 1)
    assert park(connection) == 0


def test_a_new_process_of_the_group_asks_about_parked_ones_but_many_do_not_ask_at_once(
    at_once: PostgresBroker, another: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    one = parked_by_checks(at_once)
    for _ in range(3):
        # Then the group counts as present, and its last answer is some minutes old.
        let_time_pass(connection, 150)
        assert asked(at_once) == []
    assert asked(another) == [one.transaction_id]
    third = PostgresBroker(database, check=NOW)
    assert asked(third) == []
    third.close()


def test_a_parked_transaction_is_asked_about_on_request(at_once: PostgresBroker) -> None:
    one = parked_by_checks(at_once)
    assert asked(at_once) == []
    at_once.hint_one_way(one.transaction_id)
    assert at_once.flush(within_seconds=5)
    assert asked(at_once) == [one.transaction_id]


def test_many_parked_ones_do_not_delay_others(at_once: PostgresBroker, connection: BrokerConnection) -> None:
    for _ in range(20):
        at_once.send_half(half())
    checks.scan(Executor(connection, "outbox"), settings=NOW)
    let_time_pass(connection, THREE_DAYS + 1)
    assert park(connection) == 20
    let_time_pass(connection, HOUR)
    fresh = half()
    at_once.send_half(fresh)
    found = [check.transaction_id for check in at_once.claim_checks("shop", limit=5)]
    assert len(found) == 5
    assert fresh.transaction_id in found


def test_the_reason_is_in_the_status_and_in_the_trace(at_once: PostgresBroker, connection: BrokerConnection) -> None:
    one = parked_by_checks(at_once)
    run = Executor(connection, "outbox")
    [fact] = parked_facts(run)
    assert (fact["producer_group"], fact["transaction"], fact["reason"]) == ("shop", str(one.transaction_id), "checks")
    [group] = read_summary(run).producers
    assert (group.group, group.undecided, group.parked) == ("shop", 0, 1)
    found = trace(run, one.transaction_id)
    assert found is not None and found.pending is not None
    assert (found.pending.park_reason, found.pending.last_answer) == ("checks", "the look-up is not there")
    at_once.end([end(one.transaction_id)])
    assert parked_facts(run) == []


def parked_facts(run: Executor) -> list[Fact]:
    """The items of the condition "parked"."""
    conditions = survey(run).verdict.conditions
    return [fact for one in conditions if one.name == "parked" for fact in one.evidence]
