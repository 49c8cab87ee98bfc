"""An option of a part decides when the calls of a subscription start. The core knows only the hooks of the part."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from outbox import hooks
from outbox.broker.consumer.lanes import FetchedEntry, Lane
from outbox.broker.consumer.owned_queue import Subscribed
from outbox.broker.consumer.subscription_runner import SubscriptionCalls
from outbox.broker.database.executor import Executor
from outbox.broker.groups import members
from outbox.broker.groups.leases import lease_clock
from outbox.broker.groups.registration import register
from outbox.broker.operations.deletion import delete_group
from outbox.errors import InvalidSubscription
from outbox.message import Delivery, Message
from outbox.subscription import Subscription, SubscriptionOption
from tests.broker.bench import ConsumptionBench, encode
from tests.support import eventually


class Narrow(SubscriptionOption):
    """Starts one call at a time until `wide` is set."""

    def __init__(self) -> None:
        self.wide, self.spent, self.lives = threading.Event(), 0, 0

    def complaints(self, subscription: Subscription) -> Iterator[str]:
        if subscription.broadcast:
            yield "a broadcast group starts at once"


class Widening:
    """The admission of `Narrow`. The step in which it allows more calls fails."""

    waiting = 0

    def __init__(self, option: Narrow, subscribed: Subscribed, calls: SubscriptionCalls, lanes: Sequence[Lane]) -> None:
        assert subscribed.admission_lease is not None
        self._option, self._lease, self._calls, self._allowed = option, subscribed.admission_lease, calls, 1
        calls.allow(1)

    def prepare(self, run: Executor, instance: UUID, now: float, *, term_seconds: float, may_start: bool) -> None:
        self._lease.trusted_until = lease_clock() + term_seconds
        if self._option.wide.is_set() and self._allowed == 1:
            self._allowed = 2
            self._calls.allow(2)
            raise psycopg.OperationalError("the statement after it failed")

    def admits(self, now: float) -> bool:
        return True

    def spend(self, items: Sequence[FetchedEntry], now: float) -> None:
        self._option.spent += len(items)

    def next_at(self, now: float) -> float | None:
        return None

    def forget(self) -> None:
        self._option.lives += 1


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
    monkeypatch.setitem(hooks.admissions, Narrow, f"{__name__}.Widening")
    rows = {name: f"{__name__}.{name}" for name in ("registered", "deleted", "process_ended", "expired")}
    monkeypatch.setitem(hooks.subscription_rows, "narrow", hooks.SubscriptionRows(**rows))
    called.clear()


def test_waiting_calls_start_when_more_are_allowed_even_if_that_step_fails(bench: ConsumptionBench) -> None:
    bench.declare("orders", queues=1)
    bench.publish([Message(topic="orders", body=encode({"n": n})) for n in range(2)])
    option, started, proceed = Narrow(), list[int](), threading.Event()

    def handle(delivery: Delivery) -> None:
        started.append(delivery.body["n"])
        assert proceed.wait(30)

    with bench.running((Subscription(group="g", topic="orders", threads=2, options=[option]), handle)):
        eventually(lambda: option.spent == 2 and started != [])
        assert (started, option.lives) == ([0], 1)
        option.wide.set()
        eventually(lambda: sorted(started) == [0, 1])
        proceed.set()
        eventually(lambda: bench.lag("g") == 0)


def test_a_part_keeps_its_rows_in_step(bench: ConsumptionBench) -> None:
    bench.declare("orders", queues=1)
    found = register(bench.run, Subscription(group="g", topic="orders", options=[Narrow()]))
    key = (found.group_id, found.topic_id)
    instance = uuid4()
    members.leave_groups(bench.run, instance)
    members.forget_the_dead(bench.run)
    delete_group(bench.run, "g")
    assert called == [("registered", key, 1), ("process_ended", instance), ("expired",), ("deleted", key)]


def test_options_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(Narrow):
        """Another option with an admission."""

    monkeypatch.setitem(hooks.admissions, Later, f"{__name__}.Widening")
    for options, broadcast, said in [
        ("running=2", False, "must be a list of options of parts"),
        (None, False, "must be a list of options of parts"),
        ([3], False, "3, which is no option of a part"),
        ([Narrow()], True, "a broadcast group starts at once"),
        ([Narrow(), Later()], False, "only one option may decide when handler calls start"),
        ([Narrow(), Narrow()], False, "only one option may decide when handler calls start"),
    ]:
        with pytest.raises(InvalidSubscription, match=said):
            Subscription(group="g", topic="orders", options=options, broadcast=broadcast)  # type: ignore[arg-type]
