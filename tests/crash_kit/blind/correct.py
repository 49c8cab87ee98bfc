"""Twenty handlers without a fault, each similar to the faulty one of the same number."""

from __future__ import annotations

import logging
from threading import Thread
from uuid import uuid4

from django.db import connection, transaction
from django.db.models import F

from outbox import Delivery
from outbox.contrib.django import ClaimedDelivery, publish, subscriber
from outbox.contrib.saga.steps import WAIT, Saga, StepAnswer, StepRefused
from outbox.errors import StepOutcomeUnknown
from tests.crash_kit.blind import outside
from tests.crash_kit.blind.models import (
    Account,
    Basket,
    BasketLine,
    Coupon,
    Customer,
    Document,
    Handled,
    Invoice,
    Label,
    LineByPosition,
    Order,
    Parcel,
    Product,
    Redemption,
    ReportLine,
    Shipment,
    TaxRate,
    Trip,
)

logger = logging.getLogger(__name__)

# 1.
# No inbox, but the message says the new state, so a second delivery changes nothing.


@subscriber("good.switch", group="good.switch", idempotent=False)
def switch_product(delivery: Delivery) -> None:
    product = Product.objects.get(number=delivery.key)
    product.hidden = delivery.body["hidden"]
    product.save()


def arrange_switch() -> None:
    Product.objects.create(number="p1")


def act_switch() -> None:
    with transaction.atomic():
        publish("good.switch", {"hidden": True}, key="p1")


def check_switch() -> None:
    assert Product.objects.get(number="p1").hidden


# 2.
# The row in the other database has the id of the message, so it is written once.


@subscriber("good.report", group="good.report")
def report_order(delivery: Delivery) -> None:
    order = Order.objects.get(number=delivery.key)
    ReportLine.objects.using("reports").get_or_create(
        message=delivery.message_id, defaults={"order": order.number, "amount": order.amount}
    )
    order.status = "reported"
    order.save()


def arrange_report() -> None:
    Order.objects.create(number="1")


def act_report() -> None:
    with transaction.atomic():
        publish("good.report", {}, key="1")


def check_report() -> None:
    assert Order.objects.get(number="1").status == "reported"
    assert ReportLine.objects.using("reports").filter(order="1").count() == 1


# 3.
# The shipment is in the transaction; on_commit only writes a log line.


@subscriber("good.ship", group="good.ship")
def ship_now(delivery: Delivery) -> None:
    number = delivery.key
    Order.objects.filter(number=number).update(status="shipping")
    Shipment.objects.create(order=number)
    transaction.on_commit(lambda: logger.info("order %s is shipping", number))


def arrange_ship() -> None:
    Order.objects.create(number="1")


def act_ship() -> None:
    with transaction.atomic():
        publish("good.ship", {}, key="1")


def check_ship() -> None:
    assert Order.objects.get(number="1").status == "shipping"
    assert Shipment.objects.filter(order="1").count() == 1


# 4.
# The message is published inside the transaction.


def pay_and_publish(number: str) -> None:
    with transaction.atomic():
        order = Order.objects.select_for_update().get(number=number)
        order.status = "paid"
        order.save()
        publish("good.paid", {"order": number}, key=number)


@subscriber("good.paid", group="good.paid")
def ship_paid(delivery: Delivery) -> None:
    Shipment.objects.create(order=delivery.body["order"])


def arrange_paid() -> None:
    Order.objects.create(number="1")


def act_paid() -> None:
    pay_and_publish("1")


def check_paid() -> None:
    assert Shipment.objects.count() == Order.objects.filter(status="paid").count()


# 5.
# The mark "handled" and the points are one transaction.


@subscriber("good.points", group="good.points", idempotent=False)
def give_points(delivery: Delivery) -> None:
    with transaction.atomic():
        _, new = Handled.objects.get_or_create(message=delivery.message_id)
        if new:
            Account.objects.filter(owner=delivery.key).update(points=F("points") + delivery.body["points"])


def arrange_points() -> None:
    Account.objects.create(owner="ada")


def act_points() -> None:
    with transaction.atomic():
        publish("good.points", {"points": 10}, key="ada")


def check_points() -> None:
    assert Account.objects.get(owner="ada").points == 10


# 6.
# The key is random, but a step keeps it, so each attempt has the same.


@subscriber("good.charge", group="good.charge", effects="outside")
def charge_order(delivery: ClaimedDelivery) -> None:
    order = Order.objects.get(number=delivery.key)
    key = delivery.step("key", lambda: str(uuid4()))
    payment = delivery.step("charge", outside.charges.call, f"{order.number}: {order.amount}", key)
    with delivery.finish():
        order.payment = payment
        order.status = "paid"
        order.save()


def arrange_charge() -> None:
    Order.objects.create(number="1", amount=250)


def act_charge() -> None:
    with transaction.atomic():
        publish("good.charge", {}, key="1")


def check_charge() -> None:
    assert Order.objects.get(number="1").status == "paid"
    assert outside.charges.acts == ["1: 250"]


# 7.
# After an interrupted transfer the handler asks the bank whether it has it.


@subscriber("good.transfer", group="good.transfer", effects="outside")
def pay_back(delivery: ClaimedDelivery) -> None:
    what = f"order {delivery.key}"
    try:
        delivery.step("transfer", outside.transfers.call, what, once=True)
    except StepOutcomeUnknown:
        if what not in outside.transfers.acts:
            delivery.step("transfer again", outside.transfers.call, what, once=True)
    with delivery.finish():
        Order.objects.filter(number=delivery.key).update(status="paid back")


def arrange_transfer() -> None:
    Order.objects.create(number="1")


def act_transfer() -> None:
    with transaction.atomic():
        publish("good.transfer", {}, key="1")


def check_transfer() -> None:
    assert Order.objects.get(number="1").status == "paid back"
    assert outside.transfers.acts == ["order 1"]


# 8.
# The coupon is locked while it is read and written.


@subscriber("good.coupon", group="good.coupon")
def redeem_coupon(delivery: Delivery) -> None:
    coupon = Coupon.objects.select_for_update().get(code=delivery.body["coupon"])
    if coupon.left > 0:
        coupon.left -= 1
        coupon.save()
        Redemption.objects.create(coupon=coupon.code, order=delivery.key)


def arrange_coupon() -> None:
    Coupon.objects.create(code="spring", left=1)


def act_coupon() -> None:
    for number in ("1", "2"):
        with transaction.atomic():
            publish("good.coupon", {"coupon": "spring"}, key=number)


def check_coupon() -> None:
    assert Redemption.objects.filter(coupon="spring").count() == 1
    assert Coupon.objects.get(code="spring").left == 0


# 9.
# The amounts are rows; the memory of the process has only tax rates, which it can read again.

_percents: dict[str, int] = {}


def percent(country: str) -> int:
    if country not in _percents:
        _percents[country] = TaxRate.objects.get(country=country).percent
    return _percents[country]


@subscriber("good.basket", group="good.basket", threads=1)
def collect_basket(delivery: Delivery) -> None:
    basket = Basket.objects.select_for_update().get(number=delivery.key)
    BasketLine.objects.create(basket=basket.number, amount=delivery.body["amount"])
    amounts = BasketLine.objects.filter(basket=basket.number).values_list("amount", flat=True)
    if len(amounts) == delivery.body["lines"]:
        total = sum(amounts) * (100 + percent(basket.country)) // 100
        Invoice.objects.create(basket=basket.number, total=total)


def arrange_basket() -> None:
    TaxRate.objects.create(country="de", percent=10)
    Basket.objects.create(number="b1", country="de")


def act_basket() -> None:
    for amount in (10, 20, 30):
        with transaction.atomic():
            publish("good.basket", {"amount": amount, "lines": 3}, key="b1")


def check_basket() -> None:
    assert [invoice.total for invoice in Invoice.objects.filter(basket="b1")] == [66]


# 10.
# The compensation gives the bank the record's id as the key.

good_trip = Saga("good_trip", Trip, topic="good.trips")


def refund_trip(trip: Trip) -> None:
    outside.refunds.call(f"{trip.guest}: {trip.charged}", key=f"trip {trip.pk}")
    trip.refunded = True
    trip.save()


@good_trip.step(undo=refund_trip)
def charge_trip(trip: Trip) -> None:
    outside.charges.call(f"{trip.guest}: 100", key=f"trip {trip.pk}")
    trip.charged = 100
    trip.save()


@good_trip.step()
def print_ticket(trip: Trip) -> None:
    raise StepRefused("the train is full")


def arrange_trip() -> None:
    pass


def act_trip() -> None:
    with transaction.atomic():
        good_trip.start(Trip.objects.create(guest="ada"))


def check_trip() -> None:
    assert Trip.objects.get(guest="ada").refunded
    assert outside.refunds.acts == ["ada: 100"]


# 11.
# The thread only computes; the handler writes the row.


def render_label(number: str, result: list[str]) -> None:
    result.append(f"order {number}")


@subscriber("good.label", group="good.label")
def pack_order(delivery: Delivery) -> None:
    result: list[str] = []
    thread = Thread(target=render_label, args=[delivery.key, result])
    thread.start()
    Order.objects.filter(number=delivery.key).update(status="packed")
    thread.join()
    Label.objects.create(order=delivery.key, text=result[0])


def arrange_label() -> None:
    Order.objects.create(number="1")


def act_label() -> None:
    with transaction.atomic():
        publish("good.label", {}, key="1")


def check_label() -> None:
    assert Order.objects.get(number="1").status == "packed"
    assert Label.objects.filter(order="1").count() == 1


# 12.
# The registration gives the name to a customer that an order has made.


@subscriber("good.customers", group="good.customers", threads=1)
def follow_customers(delivery: Delivery) -> None:
    if delivery.tag == "registered":
        Customer.objects.update_or_create(email=delivery.key, defaults={"name": delivery.body["name"]})
    else:
        Customer.objects.get_or_create(email=delivery.key)
        Order.objects.create(number=delivery.body["order"], customer=delivery.key)


def arrange_customers() -> None:
    pass


def act_customers() -> None:
    with transaction.atomic():
        publish("good.customers", {"name": "Ada"}, key="ada@example.org", tag="registered")
    with transaction.atomic():
        publish("good.customers", {"order": "1"}, key="ada@example.org", tag="ordered")


def check_customers() -> None:
    assert Customer.objects.get(email="ada@example.org").name == "Ada"
    assert Order.objects.get(number="1").customer == "ada@example.org"


# 13.
# A line is unique by its order and position, so a second delivery conflicts with all lines.


@subscriber("good.lines", group="good.lines", idempotent=False)
def store_lines(delivery: Delivery) -> None:
    LineByPosition.objects.bulk_create(
        [LineByPosition(order=delivery.key, position=position) for position in range(delivery.body["lines"])],
        ignore_conflicts=True,
    )


def arrange_lines() -> None:
    pass


def act_lines() -> None:
    with transaction.atomic():
        publish("good.lines", {"lines": 3}, key="1")


def check_lines() -> None:
    assert sorted(line.position for line in LineByPosition.objects.filter(order="1")) == [0, 1, 2]


# 14.
# The lock belongs to the transaction, so a crash gives it back.


@subscriber("good.locked", group="good.locked")
def ship_under_lock(delivery: Delivery) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", [f"order-{delivery.key}"])
    Shipment.objects.create(order=delivery.key)


def arrange_locked() -> None:
    pass


def act_locked() -> None:
    with transaction.atomic():
        publish("good.locked", {}, key="1")


def check_locked() -> None:
    assert Shipment.objects.filter(order="1").count() == 1


# 15.
# A file that is gone already is no error.


@subscriber("good.document", group="good.document")
def delete_document(delivery: Delivery) -> None:
    document = Document.objects.get(number=delivery.key)
    for name in document.files:
        (outside.documents() / name).unlink(missing_ok=True)
    document.delete()


def arrange_document() -> None:
    for name in ("a.pdf", "b.pdf"):
        (outside.documents() / name).write_text("text")
    Document.objects.create(number="1", files=["a.pdf", "b.pdf"])


def act_document() -> None:
    with transaction.atomic():
        publish("good.document", {}, key="1")


def check_document() -> None:
    assert not Document.objects.filter(number="1").exists()
    assert list(outside.documents().iterdir()) == []


# 16.
# Each step has the name of its parcel.


def ship_parcel(parcel: int, key: str) -> None:
    outside.courier.call(f"parcel of order {Parcel.objects.get(pk=parcel).order}", key)
    Parcel.objects.filter(pk=parcel).update(shipped=True)


@subscriber("good.parcels", group="good.parcels", effects="outside")
def ship_parcels(delivery: ClaimedDelivery) -> None:
    waiting = Parcel.objects.filter(order=delivery.key, shipped=False).order_by("pk")
    for parcel in waiting:
        delivery.step(f"ship {parcel.pk}", ship_parcel, parcel.pk, delivery.step_key(f"parcel {parcel.pk}"))
    with delivery.finish():
        Order.objects.filter(number=delivery.key).update(status="shipped")


def arrange_parcels() -> None:
    Order.objects.create(number="1")
    for _ in range(3):
        Parcel.objects.create(order="1")


def act_parcels() -> None:
    with transaction.atomic():
        publish("good.parcels", {}, key="1")


def check_parcels() -> None:
    assert Order.objects.get(number="1").status == "shipped"
    assert not Parcel.objects.filter(order="1", shipped=False).exists()
    assert len(outside.courier.acts) == 3


# 17.
# The step returns its result.


@subscriber("good.invoice", group="good.invoice", effects="outside")
def write_invoice(delivery: ClaimedDelivery) -> None:
    def call() -> str:
        return outside.invoices.call(f"order {delivery.key}", delivery.step_key("invoice"))

    answer = {"id": delivery.step("invoice", call)}
    with delivery.finish():
        Order.objects.filter(number=delivery.key).update(payment=answer.get("id", ""), status="invoiced")


def arrange_invoice() -> None:
    Order.objects.create(number="1")


def act_invoice() -> None:
    with transaction.atomic():
        publish("good.invoice", {}, key="1")


def check_invoice() -> None:
    order = Order.objects.get(number="1")
    assert order.status == "invoiced"
    assert order.payment == "invoice-0"
    assert len(outside.invoices.acts) == 1


# 18.
# The same handler, but the topic is FIFO and the group keeps the order of a key, so no price comes late.


@subscriber("good.price", group="good.price", mode="key_ordered")
def set_price(delivery: Delivery) -> None:
    Product.objects.filter(number=delivery.key).update(price=delivery.body["price"])


def arrange_price() -> None:
    Product.objects.create(number="p1", price=8)


def act_price() -> None:
    for price in (10, 12):
        with transaction.atomic():
            publish("good.price", {"price": price}, key="p1")


def check_price() -> None:
    assert Product.objects.get(number="p1").price == 12


# 19.
# The saga proceeds in the transaction that stores the payment.

good_tour = Saga("good_tour", Trip, topic="good.tours")


@good_tour.step()
def ask_for_money(trip: Trip) -> StepAnswer:
    publish("good.money", {"amount": 70}, key=trip.pk)
    return WAIT


@good_tour.step()
def print_tour(trip: Trip) -> None:
    trip.ticket = f"ticket of {trip.guest}"
    trip.save(update_fields=["ticket"])


@subscriber("good.money", group="good.money", idempotent=False)
def take_money(delivery: Delivery) -> None:
    with transaction.atomic():
        if good_tour.proceed(int(delivery.key), at="ask_for_money"):
            Trip.objects.filter(pk=delivery.key).update(charged=delivery.body["amount"])


def arrange_tour() -> None:
    pass


def act_tour() -> None:
    with transaction.atomic():
        good_tour.start(Trip.objects.create(guest="ada"))


def check_tour() -> None:
    trip = Trip.objects.get(guest="ada")
    assert trip.ticket == "ticket of ada"
    assert trip.charged == 70


# 20.
# The number of the attempt is only logged; the service recognises the text by its key.


@subscriber("good.text", group="good.text")
def send_text(delivery: Delivery) -> None:
    Order.objects.filter(number=delivery.key).update(status="on its way")
    if delivery.attempt > 1:
        logger.warning("order %s: attempt %d", delivery.key, delivery.attempt)
    outside.texts.call(f"order {delivery.key} is on its way", delivery.idempotency_key)


def arrange_text() -> None:
    Order.objects.create(number="1")


def act_text() -> None:
    with transaction.atomic():
        publish("good.text", {}, key="1")


def check_text() -> None:
    assert Order.objects.get(number="1").status == "on its way"
    assert outside.texts.acts == ["order 1 is on its way"]
