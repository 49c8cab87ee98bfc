"""An option of a part decides when the calls of a subscription start. The core knows only the hooks of the part."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from outbox import hooks
from outbox.broker.consumer.lanes import FetchedEntry, Lane
from outbox.broker.consumer.owned_queue import Subscribed
from outbox.broker.consumer.scheduler import SubscriptionCalls
from outbox.broker.database.executor import Executor
from outbox.broker.groups import members
from outbox.broker.groups.leases import lease_clock
from outbox.broker.groups.registration import register
from outbox.broker.operations.deletion import delete_group
from outbox.errors import InvalidSubscription
from outbox.message import Delivery, Message
from outbox.subscription import Mode, Subscription, SubscriptionOption
from tests.broker.bench import FIFO, ConsumptionBench, encode
from tests.support import eventually


class After(SubscriptionOption):
    """Start at most `most` calls, and none before the time `at` (time.monotonic)."""

    def __init__(self, at: float, most: int = 100) -> None:
        self.at, self.most, self.spent, self.lives = at, most, 0, 0

    def complaints(self, subscription: Subscription) -> Iterator[str]:
        if subscription.broadcast:
            yield "a broadcast group starts at once"


class Opening:
    """The admission of `After`."""

    def __init__(self, option: After, subscribed: Subscribed, pool: SubscriptionCalls, lanes: Sequence[Lane]) -> None:
        assert subscribed.admission_lease is not None
        self._option, self._lease, self._lanes = option, subscribed.admission_lease, lanes
        pool.allow(None)

    def prepare(self, run: Executor, instance: UUID, now: float, *, term_seconds: float, may_start: bool) -> None:
        self._lease.trusted_until = lease_clock() + term_seconds

    def admits(self, now: float) -> bool:
        return now >= self._option.at and self._option.spent < self._option.most

    def spend(self, items: Sequence[FetchedEntry], now: float) -> None:
        self._option.spent += len(items)

    def next_at(self, now: float) -> float | None:
        return self._option.at if now < self._option.at else None

    @property
    def waiting(self) -> int:
        return sum(lane.waiting for lane in self._lanes)

    def forget(self) -> None:
        self._option.lives += 1


class Narrow(After):
    """Starts one call at a time until `wide` is set."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.wide = threading.Event()


class Widening(Opening):
    """The admission of `Narrow`. The step in which it allows more calls fails."""

    def __init__(self, option: Narrow, subscribed: Subscribed, calls: SubscriptionCalls, lanes: Sequence[Lane]) -> None:
        super().__init__(option, subscribed, calls, lanes)
        self._wide, self._calls, self._allowed = option.wide, calls, 1
        calls.allow(1)

    def prepare(self, run: Executor, instance: UUID, now: float, *, term_seconds: float, may_start: bool) -> None:
        super().prepare(run, instance, now, term_seconds=term_seconds, may_start=may_start)
        if self._wide.is_set() and self._allowed == 1:
            self._allowed = 2
            self._calls.allow(2)
            raise psycopg.OperationalError("the statement after it failed")


called: list[tuple[Any, ...]] = []


def registered(run: Executor, key: tuple[int, int], subscription: Subscription) -> None:
    called.append(("registered", key, len(subscription.options)))


def deleted(run: Executor, key: tuple[int, int]) -> None:
    called.append(("deleted", key))


def process_ended(run: Executor, instance: UUID) -> None:
    called.append(("process_ended", instance))


def expired(run: Executor) -> None:
    called.append(("expired",))


@pytest.fixture(autouse=True)
def part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hooks.admissions, After, f"{__name__}.Opening")
    rows = {name: f"{__name__}.{name}" for name in ("registered", "deleted", "process_ended", "expired")}
    monkeypatch.setitem(hooks.subscription_rows, "after", hooks.SubscriptionRows(**rows))
    called.clear()


@pytest.mark.parametrize("mode", list(Mode))
def test_messages_wait_in_their_lane_until_they_are_admitted(bench: ConsumptionBench, mode: Mode) -> None:
    bench.declare("orders", queues=1, types=FIFO)
    bench.publish([Message(topic="orders", key="a", body=encode({"n": n})) for n in range(4)])
    option = After(time.monotonic() + 0.5, most=3)
    started: list[tuple[int, float, int]] = []

    def handle(delivery: Delivery) -> None:
        started.append((delivery.body["n"], time.monotonic(), delivery.attempt))

    subscription = Subscription(group="g", topic="orders", mode=mode, threads=1, options=[option])
    with bench.running((subscription, handle)):
        eventually(lambda: len(started) == 3 and bench.lag("g") == 1)
    assert [(n, attempt) for n, _, attempt in started] == [(0, 1), (1, 1), (2, 1)]
    assert all(at >= option.at for _, at, _ in started)
    assert option.spent == 3 and option.lives >= 1


def test_waiting_calls_start_when_more_are_allowed_even_if_that_step_fails(
    bench: ConsumptionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(hooks.admissions, Narrow, f"{__name__}.Widening")
    bench.declare("orders", queues=1)
    bench.publish([Message(topic="orders", body=encode({"n": n})) for n in range(2)])
    option, started, proceed = Narrow(), list[int](), threading.Event()

    def handle(delivery: Delivery) -> None:
        started.append(delivery.body["n"])
        assert proceed.wait(30)

    with bench.running((Subscription(group="g", topic="orders", threads=2, options=[option]), handle)):
        eventually(lambda: option.spent == 2 and started != [])
        assert started == [0]
        option.wide.set()
        eventually(lambda: sorted(started) == [0, 1])
        proceed.set()
        eventually(lambda: bench.lag("g") == 0)


def test_a_part_keeps_its_rows_in_step(bench: ConsumptionBench) -> None:
    bench.declare("orders", queues=1)
    subscription = Subscription(group="g", topic="orders", options=[After(0.0)])
    found = register(bench.run, subscription)
    key = (found.group_id, found.topic_id)
    instance = uuid4()
    members.leave_groups(bench.run, instance)
    members.forget_the_dead(bench.run)
    delete_group(bench.run, "g")
    assert called == [("registered", key, 1), ("process_ended", instance), ("expired",), ("deleted", key)]


def test_options_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(After):
        """Another option with an admission."""

    monkeypatch.setitem(hooks.admissions, Later, f"{__name__}.Opening")
    for options, broadcast, said in [
        ("running=2", False, "must be a list of options of parts"),
        (None, False, "must be a list of options of parts"),
        ([3], False, "3, which is no option of a part"),
        ([After(0.0)], True, "a broadcast group starts at once"),
        ([After(0.0), Later(0.0)], False, "only one option may decide when handler calls start"),
        ([After(0.0), After(1.0)], False, "only one option may decide when handler calls start"),
    ]:
        with pytest.raises(InvalidSubscription, match=said):
            Subscription(group="g", topic="orders", options=options, broadcast=broadcast)  # type: ignore[arg-type]
