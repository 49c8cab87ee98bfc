"""Calls that share a transaction: how a process takes them, times them, notes them and books their results."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from outbox import ports
from outbox.broker.consumer import running_calls
from outbox.broker.consumer.call import SHORT_SECONDS, HandlerCall, SharedCalls, Sharing
from outbox.broker.consumer.running_calls import RunningCalls
from outbox.broker.consumer.scheduler import Caller, Calls, Scheduler
from outbox.broker.consumer.subscription_runner import SubscriptionCalls
from outbox.codec import Codecs
from outbox.message import Delivery
from outbox.ports import Disposition, MoreCalls, RunAlone
from outbox.subscription import Mode, Subscription
from tests.broker.bench import ConsumptionBench
from tests.broker.dispatch.test_failures import message, subscribe
from tests.support import eventually


@pytest.fixture
def orders(bench: ConsumptionBench) -> ConsumptionBench:
    bench.declare("orders", queues=1)
    return bench


class Together:
    """A sharing invoker without a database: effects exist from the end of a transaction on.

    `refuse` is called with the messages of a transaction before it ends. If it returns True, the transaction fails. The
    inbox rows of the messages in `skipped` exist, so these messages are skipped if they join.
    """

    def __init__(
        self,
        handler: Callable[[Delivery], Any],
        refuse: Callable[[list[int]], bool] = lambda _: False,
        skipped: Collection[int] = (),
    ) -> None:
        self.handler = handler
        self.refuse = refuse
        self.skipped = frozenset(skipped)
        self.transactions: list[list[int]] = []
        self._lock = threading.Lock()

    def __call__(
        self, subscription: Subscription, handler: Any, deliveries: Sequence[Delivery], *, generation: int
    ) -> Sequence[Disposition | Exception]:
        results = ports.call_handler(subscription, handler, deliveries, generation=generation)
        with self._lock:
            # A result may be an error, and it may compare itself in its own way.
            if len(results) == 1 and results[0] is Disposition.HANDLED:
                self.transactions.append([deliveries[0].body["n"]])
        return results

    def share(
        self, subscription: Subscription, handler: Any, delivery: Delivery, more: MoreCalls, *, generation: int
    ) -> Sequence[Disposition | Exception | RunAlone]:
        results: list[Any] = list(ports.call_handler(subscription, handler, [delivery], generation=generation))
        given = [delivery]
        while isinstance(results[-1], Disposition) and (joined := more.next()) is not None:
            given.append(joined)
            if joined.body["n"] in self.skipped:
                results.append(Disposition.SKIPPED)
                continue
            with more.running(joined):
                results += ports.call_handler(subscription, handler, [joined], generation=generation)
        done = [one.body["n"] for one, result in zip(given, results, strict=True) if result is Disposition.HANDLED]
        if len(given) > 1 and self.refuse(done):
            return [RunAlone.RUN_ALONE] * len(given)
        with self._lock:
            self.transactions.append(done)
        return results

    @property
    def effects(self) -> Counter[int]:
        with self._lock:
            return Counter(n for one in self.transactions for n in one)

    @property
    def largest(self) -> int:
        with self._lock:
            return max(map(len, self.transactions), default=0)


def options(together: Together, most: int = 8) -> dict[str, Any]:
    return {"invoker": together, "share": together.share, "sharing_calls": most}


def everything(count: int) -> Counter[int]:
    return Counter(range(count))


def test_waiting_calls_share_transactions_up_to_the_limit(orders: ConsumptionBench) -> None:
    together = Together(lambda delivery: None)
    orders.publish([message(n) for n in range(200)])
    orders.run_until_idle(subscribe(threads=2), together.handler, **options(together))
    assert together.effects == everything(200)
    assert 1 < together.largest <= 8
    orders.assert_conserved("g")


def test_ordered_calls_and_batches_do_not_share(orders: ConsumptionBench) -> None:
    called: list[int] = []

    def share(*_: object, **__: object) -> Any:
        called.append(1)

    orders.publish([message(n) for n in range(50)])
    choices: list[dict[str, Any]] = [{"mode": Mode.ORDERLY}, {"mode": Mode.KEY_ORDERED}, {"batch": 4}]
    for number, choice in enumerate(choices):
        subscription = subscribe(group=f"g{number}", threads=2, **choice)
        orders.run_until_idle(subscription, lambda given: None, share=share, sharing_calls=8)
        assert (orders.lag(f"g{number}"), called) == (0, [])


class Odd(Exception):
    """An error that compares itself with its own kind only."""

    code = 1

    def __eq__(self, other: object) -> bool:
        return self.code == other.code  # type: ignore[attr-defined, no-any-return]

    __hash__ = Exception.__hash__


def test_a_failure_charges_its_own_message(orders: ConsumptionBench) -> None:
    attempts = Counter[int]()

    def handle(delivery: Delivery) -> None:
        n = delivery.body["n"]
        attempts[n] += 1
        if n % 10 == 7 and delivery.attempt == 1:
            raise Odd(n)

    together = Together(handle)
    orders.publish([message(n) for n in range(100)])
    orders.run_until_idle(subscribe(threads=2), handle, **options(together))
    assert together.effects == everything(100)
    assert together.largest > 1
    assert orders.rows("SELECT count(*), count(DISTINCT log_id) FROM outbox.failure") == [(10, 10)]
    orders.assert_conserved("g")


def test_an_error_of_the_invoker_charges_the_last_message_only(orders: ConsumptionBench) -> None:
    def refuse(done: list[int]) -> bool:
        if done[-1] == 13:
            raise SystemExit("stop")
        return False

    together = Together(lambda delivery: None, refuse=refuse)
    orders.publish([message(n) for n in range(60)])
    orders.run_until_idle(subscribe(threads=1), together.handler, **options(together, most=3))
    assert together.effects == everything(60)
    assert len(orders.rows("SELECT 1 FROM outbox.failure")) <= 1


def test_only_the_running_message_is_noted_for_the_parent(
    orders: ConsumptionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the process dies, the messages before it are not suspected, and they come again."""
    noted: dict[int, list[int]] = {}
    most: list[int] = []
    original, forget = RunningCalls.note, RunningCalls.forget

    def note(self: RunningCalls, group_id: int, log_ids: Sequence[int], *, alone: bool) -> int | None:
        slot = original(self, group_id, log_ids, alone=alone)
        assert slot is not None
        noted[slot] = list(log_ids)
        return slot

    def forgotten(self: RunningCalls, slot: int) -> None:
        del noted[slot]
        forget(self, slot)

    monkeypatch.setattr(RunningCalls, "note", note)
    monkeypatch.setattr(RunningCalls, "forget", forgotten)
    together = Together(lambda delivery: most.append(sum(map(len, noted.values()))))
    orders.publish([message(n) for n in range(60)])
    with tempfile.TemporaryFile() as file:
        monkeypatch.setenv(running_calls.VARIABLE, str(os.dup(file.fileno())))
        orders.run_until_idle(subscribe(threads=1), together.handler, **options(together))
    assert together.largest > 1
    assert set(most) == {1}
    assert noted == {}


# -- unusual failures ------------------------------------------------------------------------------


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[SubscriptionCalls]:
    made: list[SubscriptionCalls] = []
    original = SubscriptionCalls.__init__

    def init(self: SubscriptionCalls, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(SubscriptionCalls, "__init__", init)
    return made


@pytest.fixture
def schedulers(monkeypatch: pytest.MonkeyPatch) -> list[Scheduler]:
    made: list[Scheduler] = []
    original = Scheduler.__init__

    def init(self: Scheduler, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(Scheduler, "__init__", init)
    return made


@pytest.mark.parametrize("seed", range(2))
def test_random_trouble(
    orders: ConsumptionBench, pools: list[SubscriptionCalls], schedulers: list[Scheduler], seed: int
) -> None:
    """No call is forgotten and no counter leaks, whatever handlers do."""
    chance = random.Random(seed)
    count = 400
    plan = {n: chance.choice(["raise", "exit", "hang", "skip", "slow"]) for n in chance.sample(range(10, count), 60)}
    if sum(kind == "hang" for kind in plan.values()) > 8:
        for n in [n for n, kind in plan.items() if kind == "hang"][8:]:
            plan[n] = "raise"
    release = threading.Event()

    def handle(delivery: Delivery) -> None:
        n = delivery.body["n"]
        kind = plan.get(n) if delivery.attempt == 1 else None
        if kind == "raise":
            raise ValueError(n)
        if kind == "exit":
            raise SystemExit(n)
        if kind == "hang":
            release.wait(0.9)
        if kind == "slow":
            time.sleep(0.03)

    hanging = {n for n, kind in plan.items() if kind == "hang"}
    together = Together(handle, refuse=lambda done: bool(hanging & set(done)))
    together.skipped = frozenset(n for n, kind in plan.items() if kind == "skip")
    orders.publish([message(n) for n in range(count)])
    with (
        orders.sequencing(),
        orders.running((subscribe(timeout_seconds=0.4, threads=3), handle), **options(together)),
    ):
        eventually(lambda: bool(pools))
        [pool] = pools
        eventually(
            lambda: set(together.effects) | together.skipped >= set(range(count)),
            within_seconds=40,
            what=lambda: f"{set(range(count)) - set(together.effects)} {vars(pool)}",
        )
        eventually(lambda: orders.lag("g") == 0)
        eventually(lambda: (pool.serving, pool.in_hand, pool.stuck) == (0, 0, 0), what=lambda: str(vars(pool)))
        [threads] = schedulers
        eventually(lambda: (len(pool.waiting), len(threads._queue), threads._busy) == (0, 0, 0))
        eventually(lambda: threads._alive == sum(thread.is_alive() for thread in threads._started))
    charged = {
        int(n)
        for (n,) in orders.rows(
            "SELECT convert_from(body, 'utf8')::jsonb ->> 'n' FROM outbox.failure JOIN outbox.commit_log USING (log_id)"
        )
    }
    assert hanging <= charged <= {n for n, kind in plan.items() if kind in ("raise", "exit", "hang")}, charged
    orders.assert_conserved("g")


# -- when calls share ------------------------------------------------------------------------------


def test_calls_share_only_while_handlers_are_short() -> None:
    sharing = Sharing(8)
    assert not sharing.allowed
    sharing.took(SHORT_SECONDS / 2)
    assert sharing.allowed
    sharing.took(SHORT_SECONDS * 100)
    assert not sharing.allowed
    for _ in range(30):
        sharing.took(0.0)
    assert sharing.allowed

    def fail(_: Any) -> None:
        time.sleep(SHORT_SECONDS * 8)
        raise ValueError

    with contextlib.suppress(ValueError):
        sharing.timed(fail)(None)
    assert not sharing.allowed
    of_one = Sharing(1)
    of_one.took(0.0)
    assert not of_one.allowed, "one message per commit"


def test_the_time_of_commit_does_not_count(orders: ConsumptionBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow disk, sharing saves the most."""
    together = Together(lambda delivery: None)
    original = Together.__call__

    def slow(*arguments: Any, **options: Any) -> Any:
        results = original(*arguments, **options)
        time.sleep(3 * SHORT_SECONDS)
        return results

    monkeypatch.setattr(Together, "__call__", slow)
    orders.publish([message(n) for n in range(60)])
    orders.run_until_idle(subscribe(threads=1), together.handler, **options(together))
    assert together.effects == everything(60)
    assert together.largest > 1


def test_after_a_failure_calls_share_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    # Multiples of 0.5 are exact. Only this module gets the other clock.
    now = 1000.0
    monkeypatch.setattr("outbox.broker.consumer.call.time", SimpleNamespace(monotonic=lambda: now))
    sharing = Sharing(8)
    sharing.took(0.0)
    pauses = []
    for _ in range(8):
        sharing.failed()
        before = now
        while not sharing.allowed:
            now += 0.5
        pauses.append(now - before)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    for _ in range(8):
        sharing.worked()
    sharing.failed()
    now += 1
    assert sharing.allowed


# -- moments between two threads -------------------------------------------------------------------


def call() -> Any:
    """A call of a subscription without a queue."""
    subscription = SimpleNamespace(timeout_seconds=1.0, group="g", topic="orders")
    group = SimpleNamespace(generation=1, name="g")
    subscribed = SimpleNamespace(subscription=subscription, group=group, key=(1, 1), admission_lease=None)
    return HandlerCall(subscribed, None, [])  # type: ignore[arg-type]


def sharing_now() -> Sharing:
    sharing = Sharing(8)
    sharing.took(0.0)
    return sharing


def test_a_message_of_another_inbox_generation_does_not_join() -> None:
    """An operator lets the group reprocess a queue, whose messages arrive while a transaction of another queue runs."""
    first, later = call(), call()
    waiting = [later]
    finished: list[HandlerCall] = []
    caller: Any = SimpleNamespace(deliver_joined=lambda work: "delivery", finished=finished.append)
    shared: Any = SharedCalls(first, sharing_now(), lambda: waiting.pop() if waiting else None, caller)
    later.subscribed = SimpleNamespace(
        subscription=first.subscribed.subscription, group=SimpleNamespace(generation=2, name="g"), key=(1, 1)
    )
    assert shared.next() is None
    assert finished == [later]
    assert list(later.results) == [None]
    assert shared.calls == [first]


def test_a_call_that_ends_while_the_dispatching_thread_looks_at_its_time() -> None:
    class Ending(HandlerCall):
        """Its handler returns between two readings of `started_at`."""

        __slots__ = ("readings",)

        @property
        def started_at(self) -> float | None:
            self.readings += 1
            return 0.0 if self.readings == 1 else None

        @started_at.setter
        def started_at(self, value: float | None) -> None:
            self.readings = 0

    like = call()
    ending = Ending(like.subscribed, like.lane, [])
    calls = Calls({}, None)  # type: ignore[arg-type]
    calls._running.add(ending)
    assert calls._overdue() == [ending]


def test_a_thread_knows_at_once_that_it_is_replaced() -> None:
    """The calls before it in the list of overdue ones may take long to book, and its thread may return meanwhile."""
    first, joined = call(), call()
    shared = SimpleNamespace(calls=[first, joined], is_given_up=False)
    for one in (first, joined):
        one.shares = shared
    joined.started_at = 0.0
    calls = Calls({}, None)  # type: ignore[arg-type]
    calls._running |= {first, joined}
    assert calls._overdue() == [joined]
    assert shared.is_given_up and first.is_given_up


def test_a_replaced_thread_calls_no_further_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message joins in the moment in which the process gives the transaction up. Another thread must handle it."""
    calls = [call() for _ in range(3)]
    finished: list[HandlerCall] = []
    alone: list[HandlerCall] = []
    caller = Caller(Together(print), Codecs(), finished.append)

    def give_up(*_: object) -> list[RunAlone]:
        # The dispatching thread has not seen the last call.
        calls[0].abandoned = calls[1].abandoned = "the handler of the second call hangs"
        return [RunAlone.RUN_ALONE] * 3

    monkeypatch.setattr(caller, "_call", give_up)
    monkeypatch.setattr(caller, "_run_alone", lambda work, _: alone.append(work))
    shared = SimpleNamespace(calls=calls, is_given_up=True)
    for one in calls:
        one.shares = shared
    caller._run_shared(shared, Sharing(8))  # type: ignore[arg-type]
    assert alone == []
    assert finished == calls
    # It goes back to its lane, and no attempt is counted.
    assert list(calls[2].results) == [None]
