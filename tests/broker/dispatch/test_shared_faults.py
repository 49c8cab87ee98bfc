"""Calls that share a transaction and fail in unusual ways."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from typing import Any

import pytest

from outbox.broker.consumer.call import SHORT_SECONDS, Sharing
from outbox.broker.consumer.scheduler import Scheduler, SubscriptionCalls
from outbox.message import Delivery
from tests.broker.bench import ConsumptionBench
from tests.broker.dispatch.test_failures import message, subscribe
from tests.broker.dispatch.test_shared_calls import Together, everything, options
from tests.support import eventually


@pytest.fixture
def orders(bench: ConsumptionBench) -> ConsumptionBench:
    bench.declare("orders", queues=1)
    return bench


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


def test_a_hang_behind_a_skipped_message_charges_the_hanging_one_only(
    orders: ConsumptionBench, pools: list[SubscriptionCalls]
) -> None:
    release = threading.Event()
    hangs: list[int] = []
    attempts = Counter[int]()

    def handle(delivery: Delivery) -> None:
        attempts[delivery.body["n"]] += 1
        if delivery.body["n"] == 20 and not hangs:
            hangs.append(1)
            release.wait(20)

    together = Together(handle, refuse=lambda done: 20 in done, skipped={17, 19})
    expected = everything(24)
    orders.publish([message(n) for n in range(24)])
    with orders.sequencing(), orders.running((subscribe(timeout_seconds=0.5, threads=1), handle), **options(together)):
        eventually(
            lambda: set(together.effects) >= set(expected) - {17, 19},
            within_seconds=15,
            what=lambda: f"{sorted(set(expected) - set(together.effects))} {attempts} {vars(pools[0])}",
        )
        [pool] = pools
        release.set()
        eventually(lambda: (pool.serving, pool.in_hand, pool.stuck) == (0, 0, 0), what=lambda: str(vars(pool)))
    assert hangs
    failures = orders.rows("SELECT log_id, error FROM outbox.failure")
    assert len(failures) == 1, failures
    [(n,)] = orders.rows(
        "SELECT convert_from(body, 'utf8')::jsonb ->> 'n' FROM outbox.commit_log WHERE log_id = %s", failures[0][0]
    )
    assert n == "20"


class Odd(Exception):
    """An error that compares itself with its own kind only."""

    def __eq__(self, other: object) -> bool:
        return self.code == other.code  # type: ignore[attr-defined, no-any-return]

    __hash__ = Exception.__hash__

    code = 1


def test_an_error_with_its_own_equality(orders: ConsumptionBench, pools: list[SubscriptionCalls]) -> None:
    def handle(delivery: Delivery) -> None:
        if delivery.body["n"] == 20 and delivery.attempt == 1:
            raise Odd("x")

    together = Together(handle)
    orders.publish([message(n) for n in range(40)])
    with orders.sequencing(), orders.running((subscribe(timeout_seconds=3, threads=1), handle), **options(together)):
        eventually(lambda: together.effects == everything(40), within_seconds=10)
    [(error,)] = orders.rows("SELECT error FROM outbox.failure")
    assert error.startswith("Odd")


def test_an_error_with_its_own_equality_without_sharing(orders: ConsumptionBench) -> None:
    seen: list[int] = []

    def handle(delivery: Delivery) -> None:
        if delivery.body["n"] == 20 and delivery.attempt == 1:
            raise Odd("x")
        seen.append(delivery.body["n"])

    orders.publish([message(n) for n in range(40)])
    with orders.sequencing(), orders.running((subscribe(timeout_seconds=3, threads=1), handle)):
        eventually(lambda: set(seen) == set(range(40)), within_seconds=10)
        eventually(lambda: orders.lag("g") == 0, within_seconds=10)
    orders.assert_conserved("g")


@pytest.mark.parametrize("seed", range(2))
def test_random_trouble(
    orders: ConsumptionBench, pools: list[SubscriptionCalls], schedulers: list[Scheduler], seed: int
) -> None:
    """No call is forgotten and no counter leaks, whatever handlers do."""
    import random

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
    assert charged <= {n for n, kind in plan.items() if kind in ("raise", "exit", "hang")}, charged - set(plan)
    orders.assert_conserved("g")


def test_slow_handlers_that_fail_end_the_sharing_too() -> None:
    sharing = Sharing(8)
    sharing.took(0.0)

    def fail(_: Any) -> None:
        time.sleep(SHORT_SECONDS * 8)
        raise ValueError

    with contextlib.suppress(ValueError):
        sharing.timed(fail)(None)  # type: ignore[arg-type]
    assert not sharing.allowed
