"""Evidence against a message in quarantine, by statement: deaths alone, vanishing on two hosts; and its end."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import pytest

from outbox.broker.groups import leases, members, quarantine
from outbox.broker.groups.quarantine import QuarantineAttempt, RunningCall
from outbox.broker.operations.changes import reset
from outbox.broker.operations.deletion import delete_group
from outbox.message import Delivery, Message
from outbox.subscription import Mode, OnError, Start, Subscription
from tests.broker.bench import AT_ONCE, ConsumptionBench

TERM = 600.0
LIFE = UUID(int=0)


class Case:
    """One message of one group, and instances that may try it."""

    def __init__(self, bench: ConsumptionBench) -> None:
        bench.declare("orders")
        bench.publish([Message(topic="orders", key=f"k{n}", body=b"{}") for n in range(3)])
        subscription = Subscription(group="g", topic="orders", retry=AT_ONCE)
        # Registers the group, without handling anything.
        bench.runtime((subscription, lambda delivery: None))._session().finish()
        self.bench = bench
        self.run = bench.run
        ((self.group_id,),) = bench.rows("SELECT group_id FROM outbox.consumer_group")
        self.log_ids = [log_id for (log_id,) in bench.rows("SELECT log_id FROM outbox.commit_log ORDER BY log_id")]
        self.log_id = self.log_ids[0]

    def instance(self) -> UUID:
        instance = uuid4()
        members.heartbeat(self.run, instance, {self.group_id: ["orders"]}, term_seconds=TERM)
        return instance

    def vanish(self, instance: UUID) -> None:
        self.bench.connection.execute(
            "UPDATE outbox.consumer SET expires_at = now() - interval '1 second' WHERE instance_id = %s", [instance]
        )

    def die(self, instance: UUID, *calls: RunningCall, hung: bool = False) -> None:
        quarantine.record_death(self.run, instance, calls, evidence="c1 on here died", hung=hung)

    def put_into_quarantine(self) -> None:
        """By a death among others."""
        self.die(
            self.instance(), RunningCall(self.group_id, [self.log_id], False), RunningCall(self.group_id, [7], False)
        )
        quarantine.clear(self.run, self.group_id, [7])

    def tries(self, instance: UUID, host: str = "here") -> QuarantineAttempt:
        """Try it now, without the pause."""
        attempt = quarantine.begin_attempt(self.run, instance, host, self.group_id, [self.log_id])
        if attempt.wait_seconds:
            self.bench.connection.execute("UPDATE outbox.quarantined_message SET due_at = now()")
            attempt = quarantine.begin_attempt(self.run, instance, host, self.group_id, [self.log_id])
        return attempt

    @property
    def alone(self) -> RunningCall:
        return RunningCall(self.group_id, [self.log_id], True)

    def row(self) -> tuple[Any, ...]:
        """(deaths, vanished, seconds until it may be tried)"""
        ((deaths, vanished, seconds),) = self.bench.rows(
            "SELECT deaths, (SELECT count(*) FROM outbox.vanished_trial v WHERE v.log_id = s.log_id),"
            " round(extract(epoch FROM due_at - seen_at))::integer FROM outbox.quarantined_message s WHERE log_id = %s",
            self.log_id,
        )
        return deaths, vanished, seconds


@pytest.fixture
def case(bench: ConsumptionBench) -> Case:
    return Case(bench)


def test_only_deaths_alone_count_and_the_pause_grows(case: Case) -> None:
    case.put_into_quarantine()
    case.put_into_quarantine()
    assert case.row() == (0, 0, 0)
    for deaths, pause in [(1, 1), (2, 4)]:
        instance = case.instance()
        assert case.tries(instance) == QuarantineAttempt()
        case.die(instance, case.alone)
        assert case.row() == (deaths, 0, pause)
    instance = case.instance()
    assert case.tries(instance) == QuarantineAttempt()
    # Beside another call, even one that already hung: the cause is not known.
    case.die(instance, case.alone, RunningCall(case.group_id, [case.log_ids[1]], False))
    assert case.row()[0] == 2
    instance = case.instance()
    assert case.tries(instance) == QuarantineAttempt()
    case.die(instance, case.alone)
    assert case.tries(case.instance()).deaths == "3 times; the last time: c1 on here died"


def test_a_death_lets_the_queues_of_the_dead_go_at_once(case: Case) -> None:
    instance = case.instance()
    (queue_id,) = case.bench.rows("SELECT min(queue_id) FROM outbox.queue")[0]
    leases.acquire(case.run, instance, case.group_id, [queue_id], life=LIFE, term_seconds=TERM)
    case.die(instance)
    assert leases.acquire(case.run, uuid4(), case.group_id, [queue_id], life=LIFE, term_seconds=TERM)
    assert members.look(case.run, [case.group_id]).members == {case.group_id: []}


def test_one_of_a_group_is_tried_at_a_time(case: Case) -> None:
    first, second = case.instance(), case.instance()
    case.put_into_quarantine()
    case.die(case.instance(), RunningCall(case.group_id, [case.log_ids[1]], False))
    assert case.tries(first) == QuarantineAttempt()
    assert quarantine.begin_attempt(case.run, second, "there", case.group_id, [case.log_ids[1]]).wait_seconds > 0
    # A repeated request after an error of the connection is the same trial.
    assert case.tries(first) == QuarantineAttempt()
    quarantine.clear(case.run, case.group_id, [case.log_id])
    assert quarantine.begin_attempt(case.run, second, "there", case.group_id, [case.log_ids[1]]) == QuarantineAttempt()


def test_vanishing_alone_counts_only_on_two_hosts(case: Case) -> None:
    case.put_into_quarantine()
    for vanished, pause in [(1, 1), (2, 4), (3, 16), (4, 64)]:
        instance = case.instance()
        assert case.tries(instance, "here") == QuarantineAttempt()
        case.vanish(instance)
        instance = case.instance()
        assert case.tries(instance, "here") == QuarantineAttempt()
        quarantine.end_attempts(case.run, instance)
        assert case.row()[:2] == (0, vanished)
        assert case.row()[2] in (pause, 0)
    instance = case.instance()
    assert case.tries(instance, "there") == QuarantineAttempt()
    case.vanish(instance)
    assert case.tries(case.instance()).deaths.startswith("5 times")


def test_an_instance_that_beats_again_has_not_vanished(case: Case) -> None:
    case.put_into_quarantine()
    gone = []
    for host in ("here", "there", "here"):
        gone.append(instance := case.instance())
        assert case.tries(instance, host) == QuarantineAttempt()
        case.vanish(instance)
    quarantine.begin_attempt(case.run, case.instance(), "here", case.group_id, [case.log_id])
    assert case.row()[:2] == (0, 3)
    quarantine.withdraw_vanished(case.run, gone[1])
    assert case.row()[:2] == (0, 2)
    assert case.tries(case.instance()) == QuarantineAttempt()


def test_what_a_parent_saw_is_not_counted_as_vanishing_too(case: Case) -> None:
    case.put_into_quarantine()
    instance = case.instance()
    assert case.tries(instance) == QuarantineAttempt()
    case.vanish(instance)
    other = case.instance()
    assert case.tries(other) == QuarantineAttempt()
    quarantine.end_attempts(case.run, other)
    case.die(instance, case.alone)
    assert case.row()[:2] == (1, 0)


def test_an_attempt_that_never_began_or_was_not_alone_proves_nothing(case: Case) -> None:
    case.put_into_quarantine()
    instance = case.instance()
    assert case.tries(instance) == QuarantineAttempt()
    # It died between the note and the call, or after the call had come back.
    case.die(instance)
    assert case.row() == (0, 0, 0)
    # Tried as one of several.
    case.die(case.instance(), RunningCall(case.group_id, case.log_ids, False))
    instance = case.instance()
    assert quarantine.begin_attempt(case.run, instance, "here", case.group_id, case.log_ids[:2]) == QuarantineAttempt()
    case.vanish(instance)
    assert case.tries(case.instance()) == QuarantineAttempt()
    assert case.row()[:2] == (0, 0)


@pytest.mark.parametrize("mode", list(Mode))
def test_a_message_with_three_deaths_is_given_up_and_its_queue_continues(bench: ConsumptionBench, mode: Mode) -> None:
    case = Case(bench)
    case.put_into_quarantine()
    bench.connection.execute("UPDATE outbox.quarantined_message SET deaths = 3")
    seen: list[str] = []

    def handle(delivery: Delivery) -> None:
        seen.append(delivery.key)

    # Independent of the subscription's reaction to errors of its handler.
    subscription = Subscription(group="g", topic="orders", mode=mode, on_error={Exception: OnError.STOP})
    bench.runtime((subscription, handle)).run_once()
    assert sorted(seen) == ["k1", "k2"]
    assert bench.rows("SELECT log_id, left(error, 15) FROM outbox.dead_letter") == [(case.log_id, "KillsItsProcess")]
    assert bench.rows("SELECT 1 FROM outbox.quarantined_message") == []
    bench.assert_conserved("g")


def test_every_instance_of_a_broadcast_group_gives_the_message_up(bench: ConsumptionBench) -> None:
    bench.declare("orders")
    bench.publish([Message(topic="orders", key=f"k{n}", body=b"{}") for n in range(3)])
    seen: list[str] = []
    subscription = Subscription(group="g", topic="orders", broadcast=True)
    runtime = bench.runtime((subscription, lambda delivery: seen.append(delivery.key)))
    runtime.run_once()
    ((group_id, log_id),) = bench.rows(
        "SELECT group_id, min(log_id) FROM outbox.consumer_group, outbox.commit_log GROUP BY 1"
    )
    quarantine.record_death(bench.run, uuid4(), [RunningCall(group_id, [log_id], False)], evidence="died", hung=False)
    bench.connection.execute("UPDATE outbox.quarantined_message SET deaths = 3")
    for _ in range(2):
        seen.clear()
        runtime.run_once()
        assert sorted(seen) == ["k1", "k2"]


def test_a_message_that_its_group_does_not_get_any_more_leaves_the_quarantine(case: Case) -> None:
    def held() -> list[int]:
        return [log_id for (log_id,) in case.bench.rows("SELECT log_id FROM outbox.quarantined_message")]

    case.put_into_quarantine()
    reset(case.run, "g", "orders", Start.EARLIEST)
    assert held() == [case.log_id]
    reset(case.run, "g", "orders", Start.LATEST)
    assert held() == []
    case.put_into_quarantine()
    case.bench.connection.execute("DELETE FROM outbox.consumer")
    delete_group(case.run, "g", topic="orders")
    assert held() == []
