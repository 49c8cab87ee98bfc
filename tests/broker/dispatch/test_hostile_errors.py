"""An exception whose text or attributes are broken fails its own message, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from outbox.broker.operations import dead_letters
from outbox.message import Delivery, Message
from outbox.ports import Disposition
from outbox.subscription import Mode, OnError, Subscription
from tests.broker.bench import AT_ONCE, ConsumptionBench, encode
from tests.hostile import FAILURES, BrokenPermanent, BrokenService, BrokenText

NAMES = list(FAILURES)
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch": {"batch": 10, "threads": 1},
    "key_ordered": {"mode": Mode.KEY_ORDERED, "suspend_seconds": 0.0, "max_suspends": 2},
    "orderly": {"mode": Mode.ORDERLY, "suspend_seconds": 0.0, "max_suspends": 2},
}


@pytest.fixture
def orders(bench: ConsumptionBench) -> ConsumptionBench:
    bench.declare("orders")
    return bench


class Printed(logging.Handler):
    """Formats each record, as a handler of a project does, and keeps what failed."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(logging.Formatter().format(record))


@pytest.mark.parametrize("mode", MODES)
def test_a_broken_exception_fails_its_own_message(orders: ConsumptionBench, mode: str) -> None:
    handled: list[int] = []

    def handle(given: Delivery | Sequence[Delivery]) -> None:
        given = [given] if isinstance(given, Delivery) else given
        for one in given:
            if (name := one.body["raise"]) is not None:
                raise FAILURES[name]()
        handled.extend(one.body["n"] for one in given)

    kinds = [*NAMES, *[None] * 5]
    orders.publish(
        [Message(topic="orders", key=f"k{n}", body=encode({"n": n, "raise": kind})) for n, kind in enumerate(kinds)]
    )
    printed = Printed()
    logger = logging.getLogger("outbox.broker.consumer.results")
    logger.addHandler(printed)
    try:
        orders.run_until_idle(Subscription(group="g", topic="orders", retry=AT_ONCE, **MODES[mode]), handle)
    finally:
        logger.removeHandler(printed)
    assert sorted(set(handled)) == [n for n, kind in enumerate(kinds) if kind is None]
    letters = dead_letters.list_dead_letters(orders.run, "g")
    found = {letter.error.partition(":")[0] for letter in letters}
    assert len(letters) == len(NAMES)
    assert {letter.attempts for letter in letters} == {3}
    # An exception that the consumer cannot examine is replaced; every other one is named by its class.
    assert found >= {"BrokenText", "RaisingText", "EndingText", "HugeText", "NamelessClass", "Compared", "HandlerError"}
    assert max(len(letter.error) for letter in letters) <= 4000
    # As a file stores them.
    assert max(len(text.encode()) for text in printed.texts) < 250_000
    assert orders.lag("g") == 0
    orders.assert_conserved("g")


def test_the_kind_of_a_broken_exception_still_decides(orders: ConsumptionBench) -> None:
    handled: list[int] = []
    errors = [BrokenText, BrokenPermanent]

    def handle(delivery: Delivery) -> None:
        if (n := delivery.body["n"]) < 2:
            raise errors[n]
        handled.append(n)

    orders.publish([Message(topic="orders", body=encode({"n": n})) for n in range(4)])
    on_error: dict[type[BaseException], OnError] = {BrokenText: OnError.DEAD_LETTER}
    orders.run_until_idle(Subscription(group="g", topic="orders", retry=AT_ONCE, on_error=on_error), handle)
    letters = dead_letters.list_dead_letters(orders.run, "g")
    assert sorted((letter.error.partition(":")[0], letter.attempts) for letter in letters) == [
        ("BrokenPermanent", 1),
        ("BrokenText", 1),
    ]
    assert sorted(handled) == [2, 3]


def test_a_service_without_a_text_pauses_and_uses_up_no_attempt(orders: ConsumptionBench) -> None:
    attempts: list[int] = []

    def handle(delivery: Delivery) -> None:
        attempts.append(delivery.attempt)
        if len(attempts) < 3:
            raise BrokenService(7)

    orders.publish([Message(topic="orders", body=encode({}))])
    orders.run_until_idle(Subscription(group="g", topic="orders", retry=AT_ONCE), handle)
    assert attempts == [1, 1, 1]
    assert dead_letters.list_dead_letters(orders.run, "g") == []


def test_a_reported_failure_that_is_no_exception_is_a_failed_attempt() -> None:
    subscription = Subscription(group="g", topic="orders")
    broken = BrokenText()
    handled, failed = subscription.contained([Disposition.HANDLED, broken])
    assert handled is Disposition.HANDLED and failed is broken
