"""Cases with a fault, which `breaks` names as the report does. Each function registers its handlers."""

from __future__ import annotations

import multiprocessing
from threading import Thread

import psycopg
from django.core import mail
from django.core.mail import send_mail
from django.db import connection, transaction
from django.db.models import F

from outbox import Delivery
from outbox.contrib.django import ClaimedDelivery, publish, subscriber
from outbox.contrib.django.database.aliases import alias_conninfo
from tests.crash_kit import outside
from tests.crash_kit.case import Case, balance, breaks, numbers, orders, pays, place, wallet_of_ann
from tests.crash_kit.shop.models import Account, Order, OrderLine, Payment, Receipt, Wallet


def charged_once() -> None:
    assert len(outside.charges()) == len(set(outside.charges()))


@breaks("@subscriber(topic, group=topic, idempotent=False)")
def awaited_without_inbox(topic: str) -> Case:
    """An async handler without an inbox awaits two statements, each of which commits by itself."""

    @subscriber(topic, group=topic, idempotent=False)
    async def handle(delivery: Delivery) -> None:
        number = delivery.body["number"]
        if await Receipt.objects.filter(number=number).aexists():
            return
        await Receipt.objects.acreate(number=number)
        await Payment.objects.acreate(number=number)

    return Case(topic)


@breaks("outside.charge(")
def charge_after_row(topic: str) -> Case:
    """The card is charged before the row is committed."""

    @subscriber(topic, group=topic)
    def handle(delivery: Delivery) -> None:
        Payment.objects.create(number=delivery.body["number"])
        outside.charge(delivery.body["number"])

    return Case(topic, charged_once)


@breaks("outside.charge(")
def charge_before_row(topic: str) -> Case:
    """The card is charged before the row is stored."""

    @subscriber(topic, group=topic)
    def handle(delivery: Delivery) -> None:
        outside.charge(delivery.body["number"])
        Payment.objects.create(number=delivery.body["number"])

    return Case(topic, charged_once)


@breaks('delivery.step("charge", ')
def claimed_charge_without_key(topic: str) -> Case:
    """A step that a crash interrupts is repeated, and the payment service gets no key that it could recognise."""

    @subscriber(topic, group=topic, effects="outside")
    def handle(delivery: ClaimedDelivery) -> None:
        delivery.step("charge", outside.charge, delivery.body["number"])
        with delivery.finish():
            Payment.objects.create(number=delivery.body["number"])

    return Case(topic, charged_once)


@breaks("")
def collected_in_memory(topic: str) -> Case:
    """The handler collects messages in memory and stores them in pairs."""
    waiting: list[int] = []

    @subscriber(topic, group=topic, threads=1)
    def handle(delivery: Delivery) -> None:
        waiting.append(delivery.body["number"])
        if len(waiting) == 2:
            Payment.objects.bulk_create(Payment(number=number) for number in waiting)
            waiting.clear()

    def check() -> None:
        if len(orders()) == 2:
            assert numbers(Payment) == orders()

    return Case(topic, check)


@breaks(".update(")
def counted_twice(topic: str) -> Case:
    """The handler has no inbox, and counts a message that is delivered twice."""

    @subscriber(topic, group=topic, idempotent=False)
    def handle(delivery: Delivery) -> None:
        Wallet.objects.filter(customer="ann").update(balance=F("balance") + 1)

    def check() -> None:
        assert balance() == len(orders())

    return Case(topic, check, prepare=wallet_of_ann, options={"duplicates": True})


@breaks(".update(")
def counter_elsewhere(topic: str) -> Case:
    """A counter in another database commits by itself."""
    wallets = Wallet.objects.using("other")

    @subscriber(topic, group=topic)
    def handle(delivery: Delivery) -> None:
        wallets.get_or_create(customer="ann")
        wallets.filter(customer="ann").update(balance=F("balance") + 1)
        Payment.objects.create(number=delivery.body["number"])

    def check() -> None:
        counted = wallets.filter(customer="ann").values_list("balance", flat=True).first() or 0
        assert counted == len(orders())

    return Case(topic, check)


@breaks("the messages in the order of seed")
def last_write_wins(topic: str) -> Case:
    """The handler stores the state of a message without looking whether it is newer."""

    @subscriber(topic, group=topic)
    def handle(delivery: Delivery) -> None:
        Order.objects.filter(number=1).update(status=delivery.body["status"])

    return Case(topic, last_state, lambda: three_states(topic), options={"shuffled": True})


def three_states(topic: str) -> None:
    """An order that is paid, sent and received."""
    with transaction.atomic():
        Order.objects.create(number=1)
    for status in ("paid", "sent", "received"):
        with transaction.atomic():
            Order.objects.filter(number=1).update(revision=F("revision") + 1)
            publish(topic, {"status": status}, key=1)


def last_state() -> None:
    order = Order.objects.filter(number=1).first()
    assert order is None or order.status == ("new", "paid", "sent", "received")[order.revision]


@breaks("Wallet.objects.get(")
def lost_update(topic: str) -> Case:
    """Two handlers read the same balance and both store it increased by one."""

    @subscriber(topic, group=topic)
    def handle(delivery: Delivery) -> None:
        wallet = Wallet.objects.get(customer=delivery.body["customer"])
        wallet.balance += 1
        wallet.save()

    def check() -> None:
        assert balance() == len(orders())

    return Case(topic, check, prepare=wallet_of_ann)


@breaks("Payment.objects.create(")
def mail_after_commit(topic: str) -> Case:
    """The mail is sent by on_commit, and a crash between COMMIT and on_commit loses it."""

    @subscriber(topic, group=topic)
    def handle(delivery: Delivery) -> None:
        Payment.objects.create(number=delivery.body["number"])
        transaction.on_commit(
            lambda: send_mail("paid", str(delivery.body["number"]), "shop@example.org", ["ann@example.org"])
        )

    def check() -> None:
        assert {int(str(item.body)) for item in mail.outbox} == set(numbers(Payment))

    return Case(topic, check)


@breaks("send_mail(")
def mail_before_commit(topic: str) -> Case:
    """The mail is sent inside the transaction, so a second attempt sends a second mail."""

    @subscriber(topic, group=topic)
    def handle(delivery: Delivery) -> None:
        Payment.objects.create(number=delivery.body["number"])
        send_mail("paid", str(delivery.body["number"]), "shop@example.org", ["ann@example.org"])

    def check() -> None:
        bodies = [item.body for item in mail.outbox]
        assert len(bodies) == len(set(bodies))

    return Case(topic, check)


@breaks("Receipt.objects.create(")
def marker_before_effect(topic: str) -> Case:
    """The handler stores that it is done before it has done its work."""

    @subscriber(topic, group=topic, idempotent=False)
    def handle(delivery: Delivery) -> None:
        number = delivery.body["number"]
        if Receipt.objects.filter(number=number).exists():
            return
        Receipt.objects.create(number=number)
        Payment.objects.create(number=number)

    return Case(topic)


@breaks("Receipt.objects.create(")
def own_connection(topic: str) -> Case:
    """The handler writes on a connection of its own, which commits by itself."""

    @subscriber(topic, group=topic)
    def handle(delivery: Delivery) -> None:
        with psycopg.connect(alias_conninfo("default"), autocommit=True) as own:
            own.execute("INSERT INTO crash_shop_payment (number) VALUES (%s)", [delivery.body["number"]])
        Receipt.objects.create(number=delivery.body["number"])

    return Case(topic)


@breaks("Order.objects.create(")
def publish_after_commit(topic: str) -> Case:
    """The message is published after the transaction of its row."""

    def scenario() -> None:
        Order.objects.create(number=1)
        publish(topic, {"number": 1}, key=1, at_once=True)

    pays(topic)
    return Case(topic, scenario=scenario)


@breaks("Order.objects.create(")
def publish_before_row(topic: str) -> Case:
    """The message is published before the transaction of its row."""

    def scenario() -> None:
        publish(topic, {"number": 1}, key=1, at_once=True)
        Order.objects.create(number=1)

    pays(topic)
    return Case(topic, scenario=scenario)


@breaks("with transaction.atomic():")
def publish_in_on_commit(topic: str) -> Case:
    """The message is published by on_commit, outside of the transaction."""

    def scenario() -> None:
        with transaction.atomic():
            Order.objects.create(number=1)
            transaction.on_commit(lambda: publish(topic, {"number": 1}, key=1, at_once=True))

    pays(topic)
    return Case(topic, scenario=scenario)


@breaks("")
def published_again(topic: str) -> Case:
    """A handler without an inbox publishes for each delivery, and the next handler counts the messages."""

    @subscriber(topic, group=topic, idempotent=False)
    def handle(delivery: Delivery) -> None:
        with transaction.atomic():
            publish("chain.receipts", delivery.body, key=delivery.key)

    @subscriber("chain.receipts", group=f"{topic}.receipts")
    def store(delivery: Delivery) -> None:
        Payment.objects.create(number=delivery.body["number"])

    # The second delivery is the only one: no process is killed.
    options = {"duplicates": True, "most_kills": 0}
    return Case(topic, scenario=lambda: place(topic, 1), further=[f"{topic}.receipts"], options=options)


@breaks("get_or_create(")
def race_of_get_or_create(topic: str) -> Case:
    """Two handlers of one customer create two accounts, because nothing keeps a customer unique."""

    @subscriber(topic, group=topic)
    def handle(delivery: Delivery) -> None:
        account, _ = Account.objects.get_or_create(customer=delivery.body["customer"])
        Account.objects.filter(pk=account.pk).update(balance=F("balance") + 1)

    def check() -> None:
        assert Account.objects.filter(customer="ann").count() <= 1

    return Case(topic, check)


def store_payment(number: int) -> None:
    Payment.objects.create(number=number)
    connection.close()


@breaks("Payment.objects.create(")
def row_by_a_faster_thread(topic: str) -> Case:
    """The row is stored by a thread, after the handler's own row if nothing crashes, and before it in other runs."""
    # Runs are forks of one process, so they share this value.
    has_run = multiprocessing.Value("b", 0)

    @subscriber(topic, group=topic)
    def handle(delivery: Delivery) -> None:
        thread = Thread(target=store_payment, args=[delivery.body["number"]])
        if has_run.value:
            thread.start()
            thread.join()
        Receipt.objects.create(number=delivery.body["number"])
        if not has_run.value:
            has_run.value = 1
            thread.start()
            thread.join()

    return Case(topic, scenario=lambda: place(topic, 1))


@breaks("Payment.objects.create(")
def row_by_a_thread(topic: str) -> Case:
    """The row is stored by a thread, in a transaction of its own."""

    @subscriber(topic, group=topic)
    def handle(delivery: Delivery) -> None:
        thread = Thread(target=store_payment, args=[delivery.body["number"]])
        thread.start()
        thread.join()
        Receipt.objects.create(number=delivery.body["number"])

    return Case(topic)


@breaks("Payment.objects.using(")
def row_elsewhere(topic: str) -> Case:
    """The effect is a row on another alias than the inbox."""

    @subscriber(topic, group=topic)
    def handle(delivery: Delivery) -> None:
        Payment.objects.using("other").create(number=delivery.body["number"])

    def check() -> None:
        assert numbers(Payment, "other") == orders()

    return Case(topic, check)


@breaks("")
def row_in_on_commit(topic: str) -> Case:
    """The row is stored by on_commit."""

    @subscriber(topic, group=topic)
    def handle(delivery: Delivery) -> None:
        transaction.on_commit(lambda: Payment.objects.create(number=delivery.body["number"]))

    return Case(topic)


@breaks("Wallet.objects.get(")
def two_handlers_of_one_row(topic: str) -> Case:
    """Handlers of two groups read the same balance, and both store it increased by one."""

    def give(delivery: Delivery) -> None:
        wallet = Wallet.objects.get(customer=delivery.body["customer"])
        wallet.balance += 1
        wallet.save()

    def check() -> None:
        assert balance() == 2 * len(orders())

    for group in (topic, f"{topic}.bonus"):
        subscriber(topic, group=group)(give)
    return Case(topic, check, lambda: place(topic, 1), wallet_of_ann, [f"{topic}.bonus"])


@breaks("with transaction.atomic():")
def two_transactions(topic: str) -> Case:
    """The scenario writes its rows in two transactions."""

    def scenario() -> None:
        with transaction.atomic():
            Order.objects.create(number=1)
            publish(topic, {"number": 1}, key=1)
        with transaction.atomic():
            OrderLine.objects.create(number=1)

    def check() -> None:
        assert numbers(OrderLine) == orders()

    pays(topic)
    return Case(topic, check, scenario)


@breaks("Payment.objects.create(")
def without_inbox(topic: str) -> Case:
    """The handler has no inbox, and its effect is not idempotent."""
    pays(topic, idempotent=False)
    return Case(topic)
