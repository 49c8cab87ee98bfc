"""Claims over real processes: kills, freezes, drains, and slow calls of a real HTTP server."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import pytest
from django.db.models.functions import Now

from outbox.broker.database.executor import Executor, Row
from outbox.broker.operations.audit import count_messages
from outbox.contrib.django import publish, run_check_back
from outbox.contrib.django.engine.broker import flush
from outbox.contrib.django.models import ClaimEntry, InboxEntry, StepEntry
from outbox.utils import faults
from tests import support
from tests.django.processes import Forking, child, forking
from tests.django.provider import Provider, provider
from tests.django.sessions import broker_connection
from tests.django.state import effects
from tests.django.support import broker_sql, differences

# Each wait includes the start of a process, the end of a lease, or the end of a claim.
eventually = functools.partial(support.eventually, within_seconds=90)

pytestmark = [pytest.mark.usefixtures("databases", "no_rows"), pytest.mark.timeout(300)]

STEPS: Final = [point for point in faults.POINTS if point.startswith("claim.")]
# Only a message whose handler runs for long passes them.
OF_SLOW_CALLS: Final = ["claim.before_leave", "claim.after_leave", "claim.before_settle", "claim.after_settle"]


@pytest.fixture
def no_rows() -> Iterator[None]:
    """Claims and steps are removed after the test."""
    yield
    ClaimEntry.objects.all().delete()
    StepEntry.objects.all().delete()


@pytest.fixture
def other() -> Iterator[Provider]:
    """The other system."""
    with provider() as made:
        yield made


def process(role: str, other: Provider, specification: str = "", **options: Any) -> AbstractContextManager[Any]:
    variables = {"TEST_PROVIDER": other.url}
    started: AbstractContextManager[Any] = child(
        role, outbox=options, faults=specification, variables=variables, subscribers="effects.slow", quiet=True
    )
    return started


def charging() -> Row:
    with broker_connection() as (connection, schema):
        return count_messages(Executor(connection, schema)).groups["charging"]


def place(*numbers: str) -> None:
    for number in numbers:
        publish("orders", {}, key=number, at_once=True)
    flush(within_seconds=5)


def payments() -> Counter[str]:
    found = broker_sql(
        "SELECT key FROM outbox.commit_log JOIN outbox.topic USING (topic_id) JOIN outbox.op_log USING (transaction_id)"
        " WHERE topic.name = 'payments' AND decision = 'C'"
    )
    return Counter(key for (key,) in found)


def has_left(*numbers: str) -> bool:
    """One of these orders, or any message, has left its queue."""
    found = broker_sql(
        "SELECT key FROM outbox.scheduled JOIN outbox.commit_log USING (log_id) WHERE queue_id IS NOT NULL"
    )
    return bool({key for (key,) in found} & set(numbers)) if numbers else bool(found)


def is_settled() -> bool:
    """No message of the group waits or is claimed."""
    found = charging()
    return not (found.lag or found.claimed or found.retrying)


def wait_until_done(other: Provider, expected: list[str]) -> None:
    """Every order took effect once, in both systems; nothing is left over, and every message is counted."""
    eventually(lambda: len(effects()) >= len(expected), what=lambda: f"{effects()}")
    eventually(is_settled, what=lambda: str(charging()))
    assert effects() == sorted(expected)
    flush(within_seconds=5)
    for number in expected:
        # One key, so the other system has acted once, however often it was called.
        assert [len(other.acted[f"{step}/{number}"]) for step in ("charge", "mail")] == [1, 1]
    # A killed process may have committed a payment without telling the broker.
    broker_sql(
        "UPDATE outbox.pending_check SET due_at = clock_timestamp(), immune_until = clock_timestamp() RETURNING 1"
    )
    run_check_back()
    eventually(lambda: payments() == Counter(expected), what=lambda: str(Counter(expected) - payments()))
    assert differences() == []
    assert InboxEntry.objects.filter(group="charging").count() == len(expected)
    assert not ClaimEntry.objects.exists()


@dataclass(frozen=True)
class Victims:
    """Consumer processes that die at fault points, one after the other."""

    other: Provider
    forking: Forking

    def kill_at(self, point: str) -> list[str]:
        """Let a consumer die at a point, and return the orders that were there."""
        orders = [f"{point}-{number}" for number in (1, 2)]
        if point in OF_SLOW_CALLS:
            self.other.held |= {f"charge/{order}" for order in orders}
        place(*orders)
        pid = self.forking.start(f"{point}=kill@1")
        if "settle" in point:
            try:
                # Orders that an earlier process had begun may wait there, too.
                eventually(lambda: has_left(*orders), what="a message that has left its queue")
            except BaseException:
                os.kill(pid, signal.SIGKILL)
                raise
            self.other.release()
        assert self.forking.wait() == -signal.SIGKILL, point
        self.other.release()
        end_terms()
        return orders


@contextmanager
def victims(other: Provider) -> Iterator[Victims]:
    variables = {"TEST_PROVIDER": other.url}
    with forking("consumer", subscribers="effects.slow", variables=variables) as started:
        yield Victims(other, started)


def end_terms() -> None:
    """End the leases and claims of the killed process, as time would."""
    broker_sql("DELETE FROM outbox.consumer RETURNING 1")
    broker_sql("UPDATE outbox.queue_lease SET expires_at = clock_timestamp() RETURNING 1")
    broker_sql("UPDATE outbox.scheduled SET due_at = clock_timestamp() WHERE queue_id IS NOT NULL RETURNING 1")
    ClaimEntry.objects.update(expires_at=Now())


def test_a_consumer_killed_inside_a_step() -> None:
    with provider() as other, process("broker", other):
        with victims(other) as killed:
            orders = killed.kill_at("claim.in_step")
        with process("consumer", other):
            wait_until_done(other, orders)
    # The step was interrupted before its result was stored, so it was repeated, with the same key.
    assert max(other.calls[f"charge/{order}"] for order in orders) == 2


@pytest.mark.slow
def test_a_consumer_killed_at_every_point(other: Provider) -> None:
    orders: list[str] = []
    with process("broker", other):
        with victims(other) as killed:
            for point in STEPS:
                orders += killed.kill_at(point)
        with process("consumer", other):
            wait_until_done(other, orders)
    for order in orders:
        if order.rpartition("-")[0] != "claim.in_step":
            assert other.calls[f"mail/{order}"] <= 2


def end(consumer: subprocess.Popen[str]) -> int:
    consumer.send_signal(signal.SIGTERM)
    return consumer.wait(90)


@pytest.mark.slow
def test_a_slow_call_delays_neither_offsets_nor_the_end_of_its_process(other: Provider) -> None:
    other.held.add("charge/slow")
    place("slow")
    with process("broker", other):
        with process("consumer", other) as first:
            eventually(lambda: other.calls["charge/slow"] == 1)
            place("quick")
            eventually(lambda: effects() == ["quick"])
            # The offset has passed the message, whose handler still runs.
            eventually(lambda: charging().lag == 0 and charging().claimed == 1, what=lambda: str(charging()))
            assert (differences(), charging().retrying) == ([], 0)
            assert end(first) == 0
        assert effects() == ["quick"]
        with process("consumer", other):
            # The second process called the other system only after the claim had ended.
            eventually(lambda: other.calls["charge/slow"] == 2)
            other.release()
            wait_until_done(other, ["quick", "slow"])


@pytest.mark.slow
def test_a_call_that_ends_while_its_process_drains_is_done(other: Provider) -> None:
    other.held.add("charge/slow")
    place("slow")
    with process("broker", other):
        with process("consumer", other, LEASE_SECONDS=10) as first:
            eventually(lambda: other.calls["charge/slow"] == 1)
            first.send_signal(signal.SIGTERM)
            # The queue is handed over while the handler still runs.
            eventually(has_left)
            other.release()
            assert first.wait(90) == 0
        assert effects() == ["slow"]
        with process("consumer", other):
            wait_until_done(other, ["slow"])
    assert other.calls["charge/slow"] == 1


@pytest.mark.slow
def test_a_process_that_was_frozen_cannot_finish_what_another_has_taken_over(other: Provider) -> None:
    place("frozen")
    with process("broker", other), process("consumer", other, "claim.before_commit=stop@1") as frozen:
        eventually(lambda: other.calls["mail/frozen"] == 1)
        with process("consumer", other):
            wait_until_done(other, ["frozen"])
            frozen.send_signal(signal.SIGCONT)
            place("next")
            wait_until_done(other, ["frozen", "next"])
            assert end(frozen) == 0
        assert effects() == ["frozen", "next"]
    # Both steps were stored, so the second process has not repeated them.
    assert (other.calls["charge/frozen"], other.calls["mail/frozen"]) == (1, 1)


@pytest.mark.slow
def test_a_claimed_message_blocks_only_its_key(other: Provider) -> None:
    other.held.add("ordered/a-1")
    for key, place_in_key in (("a", "1"), ("a", "2"), ("b", "1")):
        publish("steps", {}, key=key, tag=place_in_key, at_once=True)
    flush(within_seconds=5)
    with process("broker", other), process("consumer", other) as first:
        eventually(lambda: effects() == ["b-1"], what=lambda: str(effects()))
        # The keys have different queues, so the process may begin with either.
        eventually(lambda: other.calls["ordered/a-1"] == 1)
        assert other.calls["ordered/a-2"] == 0
        first.kill()
        first.wait(20)
        with process("consumer", other):
            eventually(lambda: other.calls["ordered/a-1"] == 2)
            assert other.calls["ordered/a-2"] == 0
            other.release()
            eventually(lambda: effects() == ["a-1", "a-2", "b-1"], what=lambda: str(effects()))
            eventually(lambda: not differences() and charging().lag == 0)


def let_limits_end() -> None:
    """Make all stored messages two hours older."""
    broker_sql("UPDATE outbox.commit_log SET stored_at = stored_at - interval '2 hours' RETURNING 1")


def is_redelivered_now(deliveries: int) -> bool:
    """Make redeliveries due, and return whether a message was queued this often."""
    broker_sql("UPDATE outbox.scheduled SET due_at = clock_timestamp() WHERE queue_id IS NOT NULL RETURNING 1")
    return bool(broker_sql(f"SELECT 1 FROM outbox.consume_queue GROUP BY log_id HAVING count(*) >= {deliveries}"))


@pytest.mark.slow
def test_a_slow_call_that_lasts_longer_than_the_time_limit_is_handled_once(other: Provider) -> None:
    other.held.add("charge/late")
    with process("broker", other), process("consumer", other):
        publish("orders", {}, key="late", timeout=3600, at_once=True)
        eventually(lambda: other.calls["charge/late"] == 1)
        eventually(has_left)
        let_limits_end()
        # The first redelivery comes while the handler runs, so it waits for the end of the claim.
        eventually(lambda: is_redelivered_now(2), what="a redelivery")
        eventually(has_left)
        assert (charging().timed_out, effects()) == (0, [])
        other.release()
        wait_until_done(other, ["late"])
    assert (charging().timed_out, charging().skipped) == (0, 1)
    assert other.calls["charge/late"] == 1


@pytest.mark.slow
def test_no_attempt_begins_after_the_time_limit(other: Provider) -> None:
    other.held.add("charge/killed")
    publish("orders", {}, key="killed", timeout=3600, at_once=True)
    with process("broker", other):
        with process("consumer", other) as first:
            eventually(lambda: other.calls["charge/killed"] == 1)
            eventually(has_left)
            first.kill()
            first.wait(20)
        publish("orders", {}, key="waiting", timeout=3600, at_once=True)
        flush(within_seconds=5)
        let_limits_end()
        with process("consumer", other):
            eventually(lambda: charging().timed_out == 2, what=lambda: str(charging()))
    assert (other.calls["charge/killed"], other.calls["charge/waiting"]) == (1, 0)
    assert (effects(), differences()) == ([], [])
    assert not ClaimEntry.objects.exists()
