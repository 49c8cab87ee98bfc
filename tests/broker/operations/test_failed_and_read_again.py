"""A reset lets a group read a failed message again: the audit counts every entry of the message once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from outbox.broker.database.executor import Row
from outbox.broker.operations import changes, dead_letters
from outbox.errors import PermanentError
from outbox.message import Delivery
from outbox.retry import RetryPolicy
from outbox.subscription import Effects, Start, Subscription
from tests.broker.bench import ConsumptionBench
from tests.broker.dispatch.test_claimed import Claims
from tests.broker.operations.support import group_of, publish
from tests.support import eventually

IN_AN_HOUR = RetryPolicy(delays_seconds=[3600.0], max_attempts=3)


class Failing:
    """A handler that raises `error`, or succeeds if there is none."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.calls = 0
        self.proceed = threading.Event()
        self.proceed.set()

    def __call__(self, delivery: Delivery) -> None:
        self.calls += 1
        assert self.proceed.wait(20)
        if self.error is not None:
            raise self.error


def read_again(bench: ConsumptionBench) -> None:
    changes.reset(bench.run, "g", "orders", Start.EARLIEST)
    group_of(bench)


def end_delays(bench: ConsumptionBench) -> None:
    bench.connection.execute("UPDATE outbox.scheduled SET due_at = clock_timestamp()")
    bench.sequence()


@pytest.mark.parametrize("error", [ValueError("fails"), PermanentError("fails for good")])
def test_in_the_transaction_of_the_inbox(bench: ConsumptionBench, error: Exception) -> None:
    bench.declare("orders", queues=1)
    handler = Failing(error)
    runtime = bench.runtime((Subscription(group="g", topic="orders", retry=IN_AN_HOUR), handler))
    runtime.run_once()
    publish(bench, "a", "b")
    for _ in range(3):
        runtime.run_once()
        group_of(bench)
        read_again(bench)
    for _ in range(5):
        runtime.run_once()
        end_delays(bench)
    found = group_of(bench)
    assert (found.dead, found.retrying, found.lag, found.queued) == (2, 0, 0, 8)
    # The first replay waits while the second entry dies, and then the message is replayed again.
    assert dead_letters.replay(bench.run, "g") == 2
    read_again(bench)
    bench.connection.execute("UPDATE outbox.scheduled SET due_at = clock_timestamp() + interval '1 hour'")
    handler.error = PermanentError("fails for good")
    runtime.run_once()
    group_of(bench)
    assert dead_letters.replay(bench.run, "g") == 0
    group_of(bench)
    handler.error = None
    end_delays(bench)
    runtime.run_once()
    found = group_of(bench)
    assert (found.handled, found.dead, found.retrying) == (2, 0, 0)


class Claimed:
    """A group whose handler claims its messages, and what it has done."""

    def __init__(self, bench: ConsumptionBench, error: Exception) -> None:
        self.bench = bench
        self.handler = Failing(error)
        self.subscription = Subscription(group="g", topic="orders", retry=IN_AN_HOUR, effects=Effects.OUTSIDE)

    def run(self, calls: int) -> Row:
        """Run a process until the handler has been called `calls` times in all."""
        with self.bench.sequencing(), self.bench.running((self.subscription, self.handler), claim=Claims()):
            eventually(lambda: self.handler.calls >= calls and self.bench.lag("g") == 0)
        assert self.handler.calls == calls
        return group_of(self.bench)


@pytest.mark.parametrize("error", [ValueError("fails"), PermanentError("fails for good")])
def test_claimed(bench: ConsumptionBench, error: Exception) -> None:
    bench.declare("orders", queues=1)
    group = Claimed(bench, error)
    publish(bench, "a")
    group.run(1)
    read_again(bench)
    found = group.run(2)
    assert (found.queued, found.dead + found.retrying, found.discarded) == (2, 1, 1)


def test_claimed_while_a_replay_of_the_message_waits(bench: ConsumptionBench) -> None:
    bench.declare("orders", queues=1)
    group = Claimed(bench, PermanentError("fails for good"))
    publish(bench, "a")
    group.run(1)
    assert dead_letters.replay(bench.run, "g") == 1
    bench.connection.execute("UPDATE outbox.scheduled SET due_at = clock_timestamp() + interval '1 hour'")
    read_again(bench)
    group.handler.proceed.clear()
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(group.run, 2)
        eventually(lambda: bench.rows("SELECT FROM outbox.finished_ahead"), what="the message to leave its queue")
        found = group_of(bench)
        assert (found.queued, found.lag, found.retrying, found.discarded) == (2, 0, 1, 1)
        group.handler.proceed.set()
        found = ended.result()
    assert (found.queued, found.dead, found.retrying, found.discarded) == (2, 1, 0, 1)
