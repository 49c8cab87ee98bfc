"""A case of the crash kit: a handler, a scenario and its assertions; and what most cases have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from django.db import transaction

from outbox import Delivery
from outbox.contrib.django import publish, subscriber
from tests.crash_kit.shop.models import Order, Payment, Wallet

Made = TypeVar("Made")


def breaks(what: str) -> Callable[[Made], Made]:
    """Say what the report of a faulty case names: a line, or the order of the messages (read by names.py)."""
    return lambda case: case


def place(topic: str, *numbers: int) -> None:
    """Store orders and publish a message about each, in one transaction each."""
    for number in numbers:
        with transaction.atomic():
            Order.objects.create(number=number)
            publish(topic, {"number": number, "customer": "ann"}, key=number)


def orders() -> list[int]:
    """Return the numbers of the stored orders."""
    return sorted(Order.objects.values_list("number", flat=True))


def numbers(model: Any, alias: str = "default") -> list[int]:
    """Return the numbers of a model's rows."""
    return sorted(model.objects.using(alias).values_list("number", flat=True))


def paid() -> None:
    """Each order has one payment, and no other has one."""
    assert numbers(Payment) == orders()


def pays(topic: str, **options: Any) -> None:
    """Register the plain handler, whose effect is a payment."""

    @subscriber(topic, group=topic, **options)
    def handle(delivery: Delivery) -> None:
        Payment.objects.create(number=delivery.body["number"])


def wallet_of_ann() -> None:
    """Prepare a case: Ann has a wallet."""
    Wallet.objects.create(customer="ann")


def balance() -> int:
    """Return the balance of Ann."""
    return Wallet.objects.get(customer="ann").balance


def nothing() -> None:
    """Prepare nothing."""


@dataclass
class Case:
    """What a crash test runs: by default two orders, each of which is paid once."""

    topic: str
    check: Callable[[], None] = paid
    scenario: Callable[[], None] | None = None
    prepare: Callable[[], None] = nothing
    further: Sequence[str] = ()
    "The groups besides the one with the name of the topic."
    options: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Run the scenario."""
        if self.scenario is None:
            place(self.topic, 1, 2)
        else:
            self.scenario()
