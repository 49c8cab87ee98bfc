"""Leases that are lost, stopped or contested, and the messages that were fetched under them."""

from __future__ import annotations

import logging
import threading
from typing import Any

import psycopg
import pytest

from outbox.broker.consumer.dispatcher import Dispatcher
from outbox.broker.consumer.owned_queue import OwnedQueue
from outbox.broker.consumer.scheduler import Scheduler
from outbox.broker.consumer.subscription_runner import SubscriptionCalls
from outbox.broker.database.executor import Executor
from outbox.broker.groups import offsets, registration
from outbox.broker.operations import changes
from outbox.message import Delivery
from outbox.subscription import Mode, OnError, Subscription
from tests.broker.bench import FIFO, ConsumptionBench, keyed
from tests.support import eventually

ORDERLY = Subscription(group="g", topic="orders", mode=Mode.ORDERLY)


@pytest.fixture
def one_queue(bench: ConsumptionBench) -> ConsumptionBench:
    bench.declare("orders", queues=1, types=FIFO)
    return bench


def test_a_message_not_started_because_its_lease_was_unsure_is_handled_in_its_place(
    one_queue: ConsumptionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler's thread finds the lease over, then it is renewed: no hole may stay where the message was."""
    seen: list[int] = []
    real = OwnedQueue.trusted
    refusals = iter([True, True])

    def trusted(queue: OwnedQueue) -> bool:
        # Unsure only at the question whether to start, and when the refusal is recorded; not in between.
        asked_by_handler = threading.current_thread().name.startswith("g-orders")
        refused = (asked_by_handler or booking.is_set()) and next(refusals, False)
        return not refused and real(queue)

    booking = threading.Event()
    absorb = Dispatcher._absorb

    def absorbing(self: Dispatcher, *given: Any) -> None:
        booking.set()
        try:
            absorb(self, *given)
        finally:
            booking.clear()

    monkeypatch.setattr(OwnedQueue, "trusted", trusted)
    monkeypatch.setattr(Dispatcher, "_absorb", absorbing)
    with one_queue.running((ORDERLY, lambda delivery: seen.append(delivery.body["n"]))):
        one_queue.publish(keyed("orders", 5, 1))
        eventually(lambda: one_queue.lag("g") == 0)
    assert next(refusals, None) is None, "the moment never came"
    assert seen == [0, 1, 2, 3, 4]


def test_a_queue_lost_and_taken_again_does_not_run_a_message_twice_at_once(
    one_queue: ConsumptionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dispatching thread learns of both at once, while the first handler still runs."""
    running: list[int] = []
    together: list[int] = []
    gate, busy, free = threading.Event(), threading.Event(), threading.Event()

    def handle(delivery: Delivery) -> None:
        together.extend(running)
        running.append(delivery.body["n"])
        gate.wait(10)
        running.remove(delivery.body["n"])

    adopt = Dispatcher._adopt

    def adopting(self: Dispatcher, connection: Any) -> None:
        if busy.is_set():
            free.wait(10)
        adopt(self, connection)

    monkeypatch.setattr(Dispatcher, "_adopt", adopting)
    with one_queue.running((ORDERLY, handle), lease_seconds=20.0):
        one_queue.publish(keyed("orders", 3, 1))
        eventually(lambda: running == [0])
        busy.set()
        one_queue.connection.execute(
            "UPDATE outbox.queue_lease SET owner = NULL, epoch = epoch + 1, expires_at = now()"
        )
        # Taken again by the same process; its dispatching thread does not know of the loss yet.
        eventually(lambda: len(one_queue.owners()) == 1)
        free.set()
        busy.clear()
        # Given back at once, since the first call still runs: the lease finds no owner until it has ended.
        eventually(lambda: len(one_queue.owners()) == 0)
        gate.set()
        eventually(lambda: one_queue.lag("g") == 0)
    assert together == []


def test_resuming_a_stopped_queue_waits_for_what_still_runs_of_it(one_queue: ConsumptionBench) -> None:
    started: list[int] = []
    gate = threading.Event()
    failures = [ValueError("broken")]

    def handle(delivery: Delivery) -> None:
        started.append(delivery.body["n"])
        if delivery.body["n"] == 0:
            gate.wait(20)
        if delivery.body["n"] == 1 and failures:
            raise failures.pop()

    subscription = Subscription(group="g", topic="orders", threads=4, on_error={ValueError: OnError.STOP})
    stopped = "SELECT count(*) FROM outbox.queue_lease WHERE stopped IS NOT NULL"
    with one_queue.running((subscription, handle)):
        one_queue.publish(keyed("orders", 3, 1))
        eventually(lambda: one_queue.rows(stopped) == [(1,)])
        assert changes.resume(one_queue.run, "g") == 1
        one_queue.publish(keyed("orders", 1, 1, start=3))
        gate.set()
        eventually(lambda: one_queue.lag("g") == 0)
    assert sorted(started) in ([0, 1, 1, 2, 3], [0, 1, 1, 2, 2, 3])
    assert started.count(0) == 1


def test_a_joiner_does_not_wait_for_a_reset_that_is_being_made(one_queue: ConsumptionBench) -> None:
    subscription = Subscription(group="g", topic="orders")
    registration.register(one_queue.run, subscription)
    with psycopg.connect(one_queue.url) as resetting:
        registration.group_id_of(Executor(resetting, "outbox"), "g")
        with one_queue.database.connect() as joining:
            joining.execute("SET lock_timeout = '5s'")
            # The heartbeat of a member refers to the group's row.
            joining.execute(
                "INSERT INTO outbox.consumer (instance_id, group_id, topics, host, pid, expires_at)"
                " VALUES (gen_random_uuid(), 1, '{orders}', 'here', 1, now())"
            )


def test_a_coordinator_that_waits_for_a_lock_reports_it_and_continues(
    one_queue: ConsumptionBench, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []
    caplog.set_level(logging.WARNING)
    with one_queue.running((ORDERLY, lambda delivery: seen.append(delivery.body["n"])), lease_seconds=2.0):
        eventually(lambda: len(one_queue.owners()) == 1)
        with psycopg.connect(one_queue.url) as locking:
            locking.execute("LOCK TABLE outbox.queue_lease IN ACCESS EXCLUSIVE MODE")
            eventually(lambda: "leases cannot be renewed now" in caplog.text)
            eventually(lambda: "is lost" in caplog.text)
        one_queue.publish(keyed("orders", 3, 1))
        eventually(lambda: seen == [0, 1, 2])


def test_a_queue_whose_position_could_not_be_read_is_given_back_at_once(
    one_queue: ConsumptionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = offsets.load
    errors = [psycopg.OperationalError("the connection was lost")]

    def loading(*given: Any) -> Any:
        if errors:
            raise errors.pop()
        return load(*given)

    monkeypatch.setattr(offsets, "load", loading)
    seen: list[int] = []
    # With a term of this length, it comes again in time only if the lease is released.
    with one_queue.running((ORDERLY, lambda delivery: seen.append(delivery.body["n"])), lease_seconds=60.0):
        one_queue.publish(keyed("orders", 1, 1))
        eventually(lambda: seen == [0])
    assert errors == []


def test_a_pool_whose_threads_were_all_stuck_works_again_when_they_return() -> None:
    gates = [threading.Event() for _ in range(5)]
    done = threading.Event()

    class Call:
        """As much of a call as the scheduler looks at."""

        def __init__(self, gate: threading.Event | None) -> None:
            self.gate, self.is_given_up, self.has_begun = gate, False, threading.Event()

    def run(call: Any, *_: object) -> None:
        call.has_begun.set()
        if call.gate is None:
            done.set()
        else:
            call.gate.wait(20)

    threads = Scheduler([Subscription(topic="orders", group="g", threads=1)], run)
    pool = SubscriptionCalls("pool", 1, threads.lock)
    stuck = [Call(gate) for gate in gates]
    for call in stuck:
        threads.submit(pool, call)  # type: ignore[arg-type]
        assert call.has_begun.wait(10)
        call.is_given_up = True
        threads.replace(pool)
    threads.submit(pool, Call(None))  # type: ignore[arg-type]
    assert not done.wait(0.1)
    for gate in gates:
        gate.set()
        threads.unstuck(pool)
    assert done.wait(10)
    threads.stop(within_seconds=5)
