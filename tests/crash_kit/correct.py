"""Cases without a fault. Each function registers its handlers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from django.core import mail
from django.core.mail import send_mail
from django.db import IntegrityError, connection, transaction

from outbox import Delivery
from outbox.contrib.django import (
    ClaimedDelivery,
    message,
    publish,
    publish_messages,
    subscriber,
    transactional_message,
)
from outbox.errors import PermanentError
from tests.crash_kit import outside
from tests.crash_kit.case import Case, balance, numbers, orders, paid, pays, place, wallet_of_ann
from tests.crash_kit.faulty import last_state, three_states
from tests.crash_kit.shop.models import Order, OrderLine, Payment, Receipt, Wallet

_TRIGGER = """
CREATE OR REPLACE FUNCTION crash_shop_audit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.status = 'audited' THEN
        INSERT INTO crash_shop_orderline (number) VALUES (NEW.number);
    END IF;
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER audit AFTER INSERT ON crash_shop_order FOR EACH ROW EXECUTE FUNCTION crash_shop_audit();
"""


def audit_trigger(topic: str) -> Case:
    """A trigger of the database writes a row beside each order; a row of both was there before the scenario."""

    def prepare() -> None:
        with connection.cursor() as cursor:
            cursor.execute(_TRIGGER)
        Order.objects.create(number=1, status="audited")

    def check() -> None:
        assert numbers(OrderLine) == [1]
        assert [1, *numbers(Payment)] == orders()

    pays(topic)
    return Case(topic, check, lambda: place(topic, 2), prepare)


def awaited(topic: str) -> Case:
    """An async handler, whose writes and inbox row are one transaction."""

    @subscriber(topic, group=topic)
    async def handle(delivery: Delivery) -> None:
        number = delivery.body["number"]
        if await Receipt.objects.filter(number=number).aexists():
            return
        await Receipt.objects.acreate(number=number)
        await Payment.objects.acreate(number=number)

    return Case(topic)


def batch(topic: str) -> Case:
    """The handler gets a batch."""

    @subscriber(topic, group=topic, batch=10)
    def handle(deliveries: Sequence[Delivery]) -> None:
        Payment.objects.bulk_create(Payment(number=delivery.body["number"]) for delivery in deliveries)

    return Case(topic)


def paid_with_receipts() -> None:
    paid()
    assert numbers(Receipt) == orders()


def chain(topic: str) -> Case:
    """A handler stores a row and publishes the next message."""

    @subscriber(topic, group=topic)
    def handle(delivery: Delivery) -> None:
        Receipt.objects.create(number=delivery.body["number"])
        publish("chain.receipts", delivery.body, key=delivery.body["number"])

    pays("chain.receipts")
    return Case(topic, paid_with_receipts, further=["chain.receipts"])


def charge_with_a_key(topic: str) -> Case:
    """The payment service ignores a number that it knows."""

    @subscriber(topic, group=topic, threads=1)
    def handle(delivery: Delivery) -> None:
        outside.charge_once(delivery.body["number"])
        Payment.objects.create(number=delivery.body["number"])

    def check() -> None:
        assert sorted(outside.charges(), key=str) == orders()
        paid()

    return Case(topic, check)


def claimed_charge(topic: str) -> Case:
    """A handler without a transaction gives the payment service the key of its step, and writes in `finish`."""

    @subscriber(topic, group=topic, effects="outside")
    def handle(delivery: ClaimedDelivery) -> None:
        delivery.step("charge", outside.charge_once, delivery.step_key("charge"))
        with delivery.finish():
            Payment.objects.create(number=delivery.body["number"])

    def check() -> None:
        assert len(outside.charges()) == len(set(outside.charges())) == len(orders())
        paid()

    return Case(topic, check)


def dead_letter(topic: str) -> Case:
    """A message is refused for good; the others are handled."""

    @subscriber(topic, group=topic)
    def handle(delivery: Delivery) -> None:
        if delivery.body["number"] == 2:
            raise PermanentError("no such order")
        Payment.objects.create(number=delivery.body["number"])

    def check() -> None:
        assert numbers(Payment) == [number for number in orders() if number != 2]

    return Case(topic, check)


def decorator(topic: str) -> Case:
    """The scenario is a function with the decorator of transactional messages."""

    @transactional_message(topic, key=lambda number: number, body=lambda number: {"number": number})
    def store(number: int) -> None:
        Order.objects.create(number=number)

    def scenario() -> None:
        store(1)
        store(2)

    pays(topic)
    return Case(topic, scenario=scenario)


def fifo(topic: str) -> Case:
    """A handler in key order stores the last state."""

    @subscriber(topic, group=topic, mode="key_ordered")
    def handle(delivery: Delivery) -> None:
        Order.objects.filter(number=1).update(status=delivery.body["status"])

    return Case(topic, last_state, lambda: three_states(topic))


def first_attempt_fails(topic: str) -> Case:
    """The first attempt of a message fails."""

    @subscriber(topic, group=topic)
    def handle(delivery: Delivery) -> None:
        Payment.objects.create(number=delivery.body["number"])
        if delivery.attempt == 1:
            raise RuntimeError("the service is away")

    return Case(topic)


def guarded_revision(topic: str) -> Case:
    """The handler ignores a state that is older than the stored one."""
    states = Wallet.objects.filter(customer="state")

    @subscriber(topic, group=topic)
    def handle(delivery: Delivery) -> None:
        new = delivery.body["revision"]
        Wallet.objects.get_or_create(customer="state", defaults={"balance": 0})
        states.filter(balance__lt=new).update(balance=new)

    def scenario() -> None:
        with transaction.atomic():
            Order.objects.create(number=1)
        for revision in (1, 2, 3):
            with transaction.atomic():
                Order.objects.filter(number=1).update(revision=revision)
                publish(topic, {"revision": revision}, key=1)

    def check() -> None:
        stored = states.values_list("balance", flat=True).first() or 0
        order = Order.objects.filter(number=1).first()
        assert stored == (order.revision if order else 0)

    return Case(topic, check, scenario, options={"shuffled": True, "duplicates": True})


def mail_at_least_once(topic: str) -> Case:
    """A mail may be sent twice, but never for an order that is not there."""

    @subscriber(topic, group=topic)
    def handle(delivery: Delivery) -> None:
        Payment.objects.create(number=delivery.body["number"])
        send_mail("paid", str(delivery.body["number"]), "shop@example.org", ["ann@example.org"])

    def check() -> None:
        assert {int(str(item.body)) for item in mail.outbox} == set(orders())

    return Case(topic, check)


def message_block(topic: str) -> Case:
    """The scenario publishes several messages in one call."""

    def scenario() -> None:
        with transaction.atomic():
            Order.objects.create(number=1)
            Order.objects.create(number=2)
            publish_messages([message(topic, {"number": number}, key=number) for number in (1, 2)])

    pays(topic)
    return Case(topic, scenario=scenario)


def rolled_back(topic: str) -> Case:
    """The transaction of a message is rolled back."""

    def scenario() -> None:
        place(topic, 1)
        with contextlib.suppress(RuntimeError), transaction.atomic():
            Order.objects.create(number=2)
            publish(topic, {"number": 2}, key=2)
            raise RuntimeError("no credit")

    pays(topic)
    return Case(topic, scenario=scenario)


def row(topic: str) -> Case:
    """The effect is a row in the transaction of the inbox."""
    pays(topic)
    return Case(topic)


def savepoint(topic: str) -> Case:
    """A conflict is caught inside a savepoint."""

    @subscriber(topic, group=topic)
    def handle(delivery: Delivery) -> None:
        with contextlib.suppress(IntegrityError), transaction.atomic():
            Receipt.objects.create(number=7)
        Payment.objects.create(number=delivery.body["number"])

    return Case(topic)


def two_groups(topic: str) -> Case:
    """Two groups handle a topic."""

    @subscriber(topic, group=f"{topic}.receipts")
    def receive(delivery: Delivery) -> None:
        Receipt.objects.create(number=delivery.body["number"])

    pays(topic)
    return Case(topic, paid_with_receipts, further=[f"{topic}.receipts"])


def two_handlers_of_one_locked_row(topic: str) -> Case:
    """Handlers of two groups lock the balance that both change."""

    def give(delivery: Delivery) -> None:
        wallet = Wallet.objects.select_for_update().get(customer=delivery.body["customer"])
        wallet.balance += 1
        wallet.save()

    def check() -> None:
        assert balance() == 2 * len(orders())

    for group in (topic, f"{topic}.bonus"):
        subscriber(topic, group=group)(give)
    return Case(topic, check, lambda: place(topic, 1), wallet_of_ann, [f"{topic}.bonus"])


def unique_without_inbox(topic: str) -> Case:
    """Without an inbox, a unique column makes the handler idempotent."""

    @subscriber(topic, group=topic, idempotent=False)
    def handle(delivery: Delivery) -> None:
        Receipt.objects.bulk_create([Receipt(number=delivery.body["number"])], ignore_conflicts=True)

    def check() -> None:
        assert numbers(Receipt) == orders()

    return Case(topic, check, options={"duplicates": True})


def upsert_elsewhere(topic: str) -> Case:
    """The effect on another alias is keyed by the message's number."""

    @subscriber(topic, group=topic)
    def handle(delivery: Delivery) -> None:
        Receipt.objects.using("other").get_or_create(number=delivery.body["number"])

    def check() -> None:
        assert numbers(Receipt, "other") == orders()

    return Case(topic, check)
