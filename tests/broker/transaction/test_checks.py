"""Check-back on the broker's side: the scan, claims, answers, parking."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from uuid import UUID

import pytest

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.log import incidents
from outbox.broker.postgres import PostgresBroker
from outbox.broker.transaction import checks, half_scan
from outbox.transaction import Answer, Check, CheckSettings, Decision, EndStatus
from tests.broker.support import end, half, in_threads, let_time_pass, message
from tests.support import eventually

UNKNOWN = Decision.UNKNOWN
NOW = CheckSettings(immunity_seconds=0, recheck_seconds=0)


@pytest.fixture
def at_once(database: BrokerDatabase) -> Iterator[PostgresBroker]:
    """A broker without immunity and recheck time."""
    broker = PostgresBroker(database, check=NOW)
    yield broker
    broker.close()


def _answers(found: Sequence[Check], decision: Decision, *, counts: bool = True, detail: str = "") -> list[Answer]:
    return [
        Answer(transaction_id=check.transaction_id, decision=decision, counts=counts, detail=detail) for check in found
    ]


def test_immunity_is_honoured_per_message_and_uses_no_check(
    broker: PostgresBroker, connection: BrokerConnection
) -> None:
    short, default, long = half(immunity_seconds=1), half(), half(immunity_seconds=100_000)
    for one in (short, default, long):
        broker.send_half(one)
    assert broker.claim_checks("shop") == []
    let_time_pass(connection, 2)
    assert [check.transaction_id for check in broker.claim_checks("shop")] == [short.transaction_id]
    let_time_pass(connection, 5)
    assert [check.transaction_id for check in broker.claim_checks("shop")] == [default.transaction_id]
    let_time_pass(connection, 99_000)
    assert long.transaction_id not in {check.transaction_id for check in broker.claim_checks("shop")}
    broker.hint_one_way(long.transaction_id)
    assert broker.flush(within_seconds=5)
    hinted = {check.transaction_id: check for check in broker.claim_checks("shop")}[long.transaction_id]
    assert not hinted.may_write
    broker.report_answers("shop", _answers([hinted], UNKNOWN))
    let_time_pass(connection, 2_000)
    after = {check.transaction_id: check for check in broker.claim_checks("shop")}[long.transaction_id]
    assert (after.may_write, after.checks) == (True, 0)


def test_a_wrong_clock_of_the_producer_causes_no_check_storm(
    broker: PostgresBroker, connection: BrokerConnection
) -> None:
    past, future = (
        half(replace(message(), born_at=datetime.now(UTC) + timedelta(days=days))) for days in (-1000, 1000)
    )
    broker.send_half(past)
    broker.send_half(future)
    assert broker.claim_checks("shop") == []
    let_time_pass(connection, 7)
    claimed = broker.claim_checks("shop")
    assert {check.transaction_id for check in claimed} == {past.transaction_id, future.transaction_id}
    assert all(6 < check.age_seconds < 100 for check in claimed)
    assert broker.claim_checks("shop") == [], "claimed: not due again before the recheck time"


def test_decided_transactions_are_not_checked_and_dropped_lazily(
    at_once: PostgresBroker, connection: BrokerConnection
) -> None:
    before, after, undecided = half(), half(), half()
    for one in (before, after, undecided):
        at_once.send_half(one)
    at_once.end([end(before.transaction_id)])
    checks.scan(Executor(connection, "outbox"), settings=NOW)
    assert connection.execute("SELECT count(*) FROM outbox.pending_check").fetchone() == (2,)
    at_once.end([end(after.transaction_id)])
    assert [check.transaction_id for check in at_once.claim_checks("shop")] == [undecided.transaction_id]
    assert connection.execute("SELECT count(*) FROM outbox.pending_check").fetchone() == (1,)


def test_a_batch_of_decided_ones_does_not_hide_an_undecided_one(
    at_once: PostgresBroker, connection: BrokerConnection
) -> None:
    halves = [half() for _ in range(25)]
    for one in halves:
        at_once.send_half(one)
    checks.scan(Executor(connection, "outbox"), settings=NOW)
    at_once.end([end(one.transaction_id) for one in halves[:-1]])
    assert [check.transaction_id for check in at_once.claim_checks("shop", limit=5)] == [halves[-1].transaction_id]


def test_nothing_is_checked_twice_by_concurrent_claims(at_once: PostgresBroker, database: BrokerDatabase) -> None:
    lasting = PostgresBroker(database, check=CheckSettings(immunity_seconds=0))
    halves = [half() for _ in range(60)]
    for one in halves:
        lasting.send_half(one)
    claims = in_threads([partial(lasting.claim_checks, "shop", limit=7) for _ in range(10)])
    claimed = [check.transaction_id for found in claims for check in found]  # type: ignore[attr-defined]
    rest = lasting.claim_checks("shop")
    assert sorted(claimed + [check.transaction_id for check in rest]) == sorted(one.transaction_id for one in halves)
    lasting.close()


def test_answers_of_another_group_are_refused(at_once: PostgresBroker, connection: BrokerConnection) -> None:
    one = half()
    at_once.send_half(one)
    found = at_once.claim_checks("shop")
    assert at_once.report_answers("intruder", _answers(found, Decision.ROLLBACK)) == [EndStatus.REFUSED]
    assert at_once.report_answers("intruder", _answers(found, UNKNOWN)) == [None]
    [check] = at_once.claim_checks("shop")
    assert check.checks == 0


def test_an_alarm_leaves_one_incident_per_transaction(at_once: PostgresBroker, connection: BrokerConnection) -> None:
    one = half()
    at_once.send_half(one)
    at_once.claim_checks("shop")
    answer = Answer(
        transaction_id=one.transaction_id, decision=UNKNOWN, counts=False, alarm=True, detail="another ledger"
    )
    at_once.report_answers("shop", [answer])
    [first] = incidents.recent(Executor(connection, "outbox"))
    assert (first.kind, first.detail) == ("wrong_ledger", "another ledger")
    # Each further check finds the same: the incident gets its time, and the condition goes on.
    at_once.report_answers("shop", [replace(answer, detail="still another ledger")])
    [again] = incidents.recent(Executor(connection, "outbox"))
    assert (again.incident_id, again.detail) == (first.incident_id, "still another ledger")
    assert first.at is not None and again.at is not None and again.at > first.at


def test_the_scan_never_misses_a_late_commit_and_never_moves_twice(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    from outbox.broker.log import commit_log
    from outbox.broker.log.topics import TopicCatalog

    late, others = half(), [half() for _ in range(40)]
    with database.connect() as open_elsewhere:
        open_elsewhere.execute("BEGIN")
        commit_log.append_half(Executor(open_elsewhere, "outbox"), TopicCatalog(), late)
        for one in others:
            broker.send_half(one)
        moved = 0
        while (counts := half_scan.scan_halves(Executor(connection, "outbox"), immunity_seconds=6, batch=7)).more:
            moved += counts.moved
        assert moved + counts.moved == 40, "an open transaction delays only itself"
        open_elsewhere.execute("COMMIT")
    assert half_scan.scan_halves(Executor(connection, "outbox"), immunity_seconds=6).moved == 1
    assert half_scan.scan_halves(Executor(connection, "outbox"), immunity_seconds=6) == half_scan.ScanCounts()
    assert _pending(connection) == {one.transaction_id for one in (late, *others)}


def test_a_scan_that_stops_early_reports_that_more_may_be_left(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    """Pruning must have seen every half, so it scans again."""
    for one in (half(), half()):
        broker.send_half(one)

    def blocked() -> bool:
        return connection.execute("SELECT count(*) > 0 FROM pg_locks WHERE NOT granted").fetchone() == (True,)

    with database.connect() as first, database.connect() as second, ThreadPoolExecutor(1) as pool:
        first.execute("BEGIN")
        half_scan.scan_halves(Executor(first, "outbox"), immunity_seconds=6)
        later = pool.submit(half_scan.scan_halves, Executor(second, "outbox"), immunity_seconds=6)
        eventually(blocked, within_seconds=10, what="the second scan waits for the first")
        first.execute("COMMIT")
        assert later.result(20).more
    assert len(_pending(connection)) == 2


def _pending(connection: BrokerConnection) -> set[UUID]:
    return {row[0] for row in connection.execute("SELECT transaction_id FROM outbox.pending_check")}
