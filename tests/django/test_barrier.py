"""The ledger and its barrier: a check-back and a late commit cannot both win."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import DatabaseError, IntegrityError, connections, transaction

from outbox import Answer, Check, CheckBack, Decision, Message
from outbox.contrib.django import get_broker, publish
from outbox.contrib.django.ledger import ledger
from outbox.contrib.django.ledger.ledger_checker import LedgerChecker, answer_by_ledger, open_connection
from outbox.contrib.django.ledger.pruning import first_id_after
from outbox.contrib.django.models import LedgerEntry, LedgerIdentity
from outbox.utils import faults
from outbox.utils.ids import uuid7
from tests.django.shop.models import Order
from tests.django.state import decisions, incidents
from tests.django.support import end_messages_lost

pytestmark = pytest.mark.usefixtures("empty_log")


def check(transaction_id: UUID, *, alias: str = "default", may_write: bool = True, **changes: Any) -> Check:
    values: dict[str, Any] = {
        "transaction_id": transaction_id,
        "producer_group": "shop",
        "ledger_id": ledger_id(alias),
        "message": Message(topic="orders", body=b"{}", message_id=transaction_id),
        "stored_at": datetime.now(UTC),
        "age_seconds": 10.0,
        "checks": 0,
        "may_write": may_write,
    }
    return Check(**values | changes)


def ledger_id(alias: str) -> UUID:
    return LedgerIdentity.objects.using(alias).get().ledger_id


def answers(checks: Sequence[Check]) -> dict[UUID, Answer]:
    return {answer.transaction_id: answer for answer in LedgerChecker().check_local_transactions(checks)}


def row(alias: str, transaction_id: UUID) -> str | None:
    return LedgerEntry.objects.using(alias).filter(pk=transaction_id).values_list("state", flat=True).first()


@pytest.fixture(params=["default", "lite"])
def alias(request: pytest.FixtureRequest) -> str:
    """PostgreSQL and SQLite."""
    return str(request.param)


def test_what_the_ledger_says_is_the_answer(alias: str) -> None:
    committed, undone, absent = uuid7(), uuid7(), uuid7()
    ledger.insert_committed(connections[alias], committed)
    ledger.insert_tombstone(connections[alias], undone, ledger_id=ledger_id(alias))
    found = answers([check(item, alias=alias) for item in (committed, undone, absent)])
    assert [found[item].decision for item in (committed, undone, absent)] == [
        Decision.COMMIT,
        Decision.ROLLBACK,
        Decision.ROLLBACK,
    ]
    assert row(alias, absent) == "R"


def test_before_immunity_ends_it_only_reads(alias: str) -> None:
    young = check(uuid7(), alias=alias, may_write=False)
    answer = answers([young])[young.transaction_id]
    assert (answer.decision, answer.counts) == (Decision.UNKNOWN, False)
    assert row(alias, young.transaction_id) is None


def test_a_transaction_still_running_is_unknown_and_uses_up_no_check(alias: str) -> None:
    running = check(uuid7(), alias=alias)
    others = [check(uuid7(), alias=alias) for _ in range(20)]
    with transaction.atomic(using=alias):
        ledger.insert_committed(connections[alias], running.transaction_id)
        found = answers([*others[:10], running, *others[10:]])
        assert (found[running.transaction_id].decision, found[running.transaction_id].counts) == (
            Decision.UNKNOWN,
            False,
        )
    # SQLite allows one writer at a time; the other databases answer all other sessions meanwhile.
    expected = Decision.UNKNOWN if connections[alias].vendor == "sqlite" else Decision.ROLLBACK
    assert {found[other.transaction_id].decision for other in others} == {expected}
    assert answers([running])[running.transaction_id].decision is Decision.COMMIT


def test_many_running_transactions_do_not_hold_up_the_others() -> None:
    running = [check(uuid7()) for _ in range(5)]
    others = [check(uuid7()) for _ in range(195)]
    with transaction.atomic():
        for item in running:
            ledger.insert_committed(connections["default"], item.transaction_id)
        mixed = sorted([*running, *others], key=lambda item: str(item.transaction_id)[::-1])
        found = answers(mixed)
    assert {found[item.transaction_id].decision for item in running} == {Decision.UNKNOWN}
    assert {found[item.transaction_id].decision for item in others} == {Decision.ROLLBACK}


def test_a_wrong_ledger_is_unknown_with_an_alarm_and_no_tombstone(alias: str) -> None:
    foreign = check(uuid7(), alias=alias, ledger_id=uuid4())
    answer = answers([foreign])[foreign.transaction_id]
    assert (answer.decision, answer.counts, answer.alarm) == (Decision.UNKNOWN, False, True)
    assert "shop" in answer.detail
    assert row(alias, foreign.transaction_id) is None


def test_an_unreadable_ledger_is_no_wrong_ledger() -> None:
    somewhere = check(uuid7(), ledger_id=uuid4())
    settings = connections.settings["other"]
    name, settings["NAME"] = settings["NAME"], "not-there"
    try:
        answer = answers([somewhere])[somewhere.transaction_id]
    finally:
        settings["NAME"] = name
    assert (answer.decision, answer.counts, answer.alarm) == (Decision.UNKNOWN, False, False)
    assert "'other'" in answer.detail


def test_each_ledger_answers_for_its_own_rows() -> None:
    checks = {name: check(uuid7(), alias=name) for name in ("default", "other", "lite")}
    ledger.insert_committed(connections["other"], checks["other"].transaction_id)
    found = answers(list(checks.values()))
    assert {name: found[item.transaction_id].decision for name, item in checks.items()} == {
        "default": Decision.ROLLBACK,
        "other": Decision.COMMIT,
        "lite": Decision.ROLLBACK,
    }
    assert row("default", checks["default"].transaction_id) == "R"
    assert row("lite", checks["default"].transaction_id) is None


def test_two_projects_with_one_group_name() -> None:
    """The second project's check-back must not roll back the first one's committed order."""
    with end_messages_lost(), transaction.atomic():
        Order.objects.create(number="paid")
        publish("orders", {}, key="paid")
    second = LedgerChecker(aliases=["other", "lite"])
    counts = CheckBack(get_broker(), "shop", second).run_once()
    assert (counts.unknown, counts.rolled_back) == (1, 0)
    assert [kind for kind, _ in incidents()] == ["wrong_ledger"]
    assert decisions() == {"paid": None}


# -- races --------------------------------------------------------------------------------------------


def _commit_late(alias: str, transaction_id: UUID, start: threading.Barrier) -> str:
    """A local transaction: 'C' if it committed, 'R' if the tombstone was first."""
    with closing(open_connection(alias)) as connection:
        if connection.vendor == "sqlite":
            connection.settings_dict["OPTIONS"]["timeout"] = 20
        connection.ensure_connection()
        start.wait()
        connection.set_autocommit(False)
        try:
            ledger.insert_committed(connection, transaction_id)
            connection.commit()
        except DatabaseError:
            connection.rollback()
            return "R"
        return "C"


def _check_once(alias: str, item: Check, start: threading.Barrier) -> Decision:
    with closing(open_connection(alias)) as connection:
        connection.ensure_connection()
        start.wait()
        return next(iter(answer_by_ledger(connection, [item]))).decision


def _check_naively(alias: str, item: Check, start: threading.Barrier) -> Decision:
    """The broken variant: no row counts as rolled back, and no tombstone is left."""
    with closing(open_connection(alias)) as connection:
        connection.ensure_connection()
        start.wait()
        found = ledger.states(connection, [item.transaction_id])
        return Decision.COMMIT if found else Decision.ROLLBACK


def race(
    alias: str, rounds: int, pool: ThreadPoolExecutor, ask: Callable[..., Decision] = _check_once
) -> list[tuple[str, str | None, list[Decision]]]:
    """One late local transaction and three checkers at once, `rounds` times: outcome, row and answers of each."""
    seen = []
    for _ in range(rounds):
        item = check(uuid7(), alias=alias)
        start = threading.Barrier(4)
        late = pool.submit(_commit_late, alias, item.transaction_id, start)
        checkers = [pool.submit(ask, alias, item, start) for _ in range(3)]
        outcome = late.result(30)
        said = [checker.result(30) for checker in checkers]
        seen.append((outcome, row(alias, item.transaction_id), said))
    return seen


def contradictions(seen: Sequence[tuple[str, str | None, list[Decision]]]) -> list[Any]:
    """Rounds in which an answer differs from what became of the local transaction."""
    wrong = {"C": Decision.ROLLBACK, "R": Decision.COMMIT}
    return [item for item in seen if item[0] != item[1] or wrong[item[0]] in item[2]]


@pytest.fixture
def pool(django_db_blocker: Any) -> Iterator[ThreadPoolExecutor]:
    """Threads with connections of their own."""
    with ThreadPoolExecutor(4) as made:
        yield made


@pytest.mark.parametrize("alias", ["lite", pytest.param("default", marks=pytest.mark.slow)], indirect=True)
def test_racing_checkers_and_late_commits_agree(alias: str, pool: ThreadPoolExecutor) -> None:
    seen = race(alias, 150 if alias == "default" else 60, pool)
    assert contradictions(seen) == []
    assert {outcome for outcome, _, _ in seen} <= {"C", "R"}


def test_the_same_race_fails_with_a_checker_without_tombstones(pool: ThreadPoolExecutor) -> None:
    for _ in range(50):
        if contradictions(race("default", 20, pool, _check_naively)):
            return
    pytest.fail("1,000 races without a tombstone and no contradiction: the race proves nothing")


@pytest.mark.slow
def test_batches_of_checks_race_with_many_transactions(pool: ThreadPoolExecutor) -> None:
    """Thousands of transactions against two checkers that check all of them, in opposite orders."""
    ids = [uuid7() for _ in range(2000)]
    checks = [check(item) for item in ids]
    results: dict[UUID, str] = {}
    said: list[Answer] = []
    # The checkers begin after the first commits, and the second half is produced after their first tombstones. So both
    # outcomes occur, however fast each thread is.
    committed, asked = threading.Event(), threading.Event()

    def produce(part: Sequence[UUID]) -> None:
        with closing(open_connection("default")) as connection:
            for number, transaction_id in enumerate(part):
                if number == len(part) // 2:
                    assert asked.wait(30)
                try:
                    ledger.insert_committed(connection, transaction_id)
                    results[transaction_id] = "C"
                    committed.set()
                except DatabaseError:
                    results[transaction_id] = "R"

    def ask(order: Sequence[Check]) -> None:
        with closing(open_connection("default")) as connection:
            assert committed.wait(30)
            for start in range(0, len(order), 100):
                said.extend(answer_by_ledger(connection, order[start : start + 100]))
                asked.set()

    running = [
        pool.submit(produce, ids[::2]),
        pool.submit(produce, ids[1::2]),
        pool.submit(ask, checks),
        pool.submit(ask, checks[::-1]),
    ]
    for future in running:
        future.result(60)
    outcome = {"C": Decision.COMMIT, "R": Decision.ROLLBACK}
    wrong = [a for a in said if a.decision not in (Decision.UNKNOWN, outcome[results[a.transaction_id]])]
    assert wrong == []
    assert set(results.values()) == {"C", "R"}


# -- kills ------------------------------------------------------------------------------------------


def _killed(checks: Sequence[Check], step: str) -> bool:
    """Whether a checker in a process of its own was killed at this step."""
    child = os.fork()
    if child == 0:
        try:
            faults.arm(f"{step}=kill")
            answers(checks)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize(("step", "left"), [("check.before_tombstone", None), ("check.after_tombstone", "R")])
def test_killed_around_the_tombstone(step: str, left: str | None) -> None:
    checks = [check(uuid7()) for _ in range(3)]
    # Once the tombstones exist, no process reaches that step again.
    for _ in range(3 if left is None else 1):
        assert _killed(checks, step)
        assert {row("default", one.transaction_id) for one in checks} == {left}
    found = answers(checks)
    assert {found[one.transaction_id].decision for one in checks} == {Decision.ROLLBACK}
    for one in checks:
        with pytest.raises(IntegrityError), transaction.atomic():
            ledger.insert_committed(connections["default"], one.transaction_id)


# -- timeouts of the database -----------------------------------------------------------------------


SETTINGS = ("statement_timeout", "lock_timeout", "transaction_timeout", "idle_in_transaction_session_timeout")
SLOW = """
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.4); RETURN NULL; END $$;
CREATE TRIGGER slow AFTER INSERT OR DELETE ON outbox_ledger FOR EACH STATEMENT EXECUTE FUNCTION slow();
"""


@pytest.fixture
def impatient(empty_log: None) -> Iterator[None]:
    """New connections to the database have timeouts, and writing to its ledger takes longer."""
    # The application's own transaction is not what is tried here.
    connections["default"].ensure_connection()
    with closing(open_connection("default")) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT name FROM pg_settings WHERE name = ANY (%s)", [list(SETTINGS)])
        known = [name for (name,) in cursor.fetchall()]
        database = connection.ops.quote_name(connection.settings_dict["NAME"])
        for name in known:
            cursor.execute(f"ALTER DATABASE {database} SET {name} = '200ms'")
        cursor.execute(SLOW)
        yield
        cursor.execute("DROP FUNCTION slow() CASCADE")
        for name in known:
            cursor.execute(f"ALTER DATABASE {database} RESET {name}")


@pytest.mark.usefixtures("impatient")
def test_the_barrier_is_written_and_rows_are_pruned() -> None:
    absent = [check(uuid7()) for _ in range(3)]
    found = answers(absent)
    assert {found[one.transaction_id].decision for one in absent} == {Decision.ROLLBACK}
    assert {row("default", one.transaction_id) for one in absent} == {"R"}
    with closing(open_connection("default")) as connection:
        ledger.advance_pruned_before(connection, first_id_after(max(one.transaction_id for one in absent)))
        assert ledger.delete(connection, [one.transaction_id for one in absent]) == 3
        with connection.cursor() as cursor:
            cursor.execute("SELECT current_setting('statement_timeout')")
            assert cursor.fetchone() == ("200ms",), "not beyond the transaction"


@pytest.mark.usefixtures("impatient")
def test_a_running_transaction_is_still_not_waited_for() -> None:
    running, other = check(uuid7()), check(uuid7())
    with transaction.atomic():
        ledger.insert_committed(connections["default"], running.transaction_id)
        found = answers([running, other])
    assert found[running.transaction_id].decision is Decision.UNKNOWN
    assert found[running.transaction_id].counts is False
    assert found[other.transaction_id].decision is Decision.ROLLBACK
