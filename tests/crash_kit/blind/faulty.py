"""Twenty handlers with a fault that shows only after a crash, a second delivery, or another order.

Each case has three functions: `arrange_…` makes the rows, `act_…` does what the shop does, `check_…` is the test.
"""

from __future__ import annotations

from contextlib import suppress
from threading import Thread
from uuid import uuid4

from django.db import IntegrityError, connection, transaction
from django.db.models import F

from outbox import Delivery
from outbox.contrib.django import ClaimedDelivery, publish, subscriber
from outbox.contrib.saga.steps import WAIT, Saga, StepAnswer, StepRefused
from outbox.errors import StepOutcomeUnknown
from tests.crash_kit.blind import outside
from tests.crash_kit.blind.models import (
    Account,
    Coupon,
    Customer,
    Document,
    Handled,
    Invoice,
    Label,
    LineByReference,
    Order,
    Parcel,
    Product,
    Redemption,
    ReportLine,
    Shipment,
    Trip,
)

# 1.
# Fault: the handler has no inbox and turns the switch, so a second delivery turns it back.


@subscriber("bad.switch", group="bad.switch", idempotent=False)
def switch_product(delivery: Delivery) -> None:
    product = Product.objects.get(number=delivery.key)
    product.hidden = not product.hidden
    product.save()


def arrange_switch() -> None:
    Product.objects.create(number="p1")


def act_switch() -> None:
    with transaction.atomic():
        publish("bad.switch", {}, key="p1")


def check_switch() -> None:
    assert Product.objects.get(number="p1").hidden


# 2.
# Fault: the row for the accountants is in another database, and stays there if the handler's transaction is lost.


@subscriber("bad.report", group="bad.report")
def report_order(delivery: Delivery) -> None:
    order = Order.objects.get(number=delivery.key)
    ReportLine.objects.using("reports").create(order=order.number, amount=order.amount)
    order.status = "reported"
    order.save()


def arrange_report() -> None:
    Order.objects.create(number="1")


def act_report() -> None:
    with transaction.atomic():
        publish("bad.report", {}, key="1")


def check_report() -> None:
    assert Order.objects.get(number="1").status == "reported"
    assert ReportLine.objects.using("reports").filter(order="1").count() == 1


# 3.
# Fault: the shipment is created after COMMIT, so a crash in between loses it.


@subscriber("bad.ship", group="bad.ship")
def ship_later(delivery: Delivery) -> None:
    number = delivery.key
    Order.objects.filter(number=number).update(status="shipping")
    transaction.on_commit(lambda: Shipment.objects.create(order=number))


def arrange_ship() -> None:
    Order.objects.create(number="1")


def act_ship() -> None:
    with transaction.atomic():
        publish("bad.ship", {}, key="1")


def check_ship() -> None:
    assert Order.objects.get(number="1").status == "shipping"
    assert Shipment.objects.filter(order="1").count() == 1


# 4.
# Fault: the message is published after the transaction, so a crash in between leaves a paid order without a shipment.


def pay_then_publish(number: str) -> None:
    with transaction.atomic():
        order = Order.objects.select_for_update().get(number=number)
        order.status = "paid"
        order.save()
    publish("bad.paid", {"order": number}, key=number, at_once=True)


@subscriber("bad.paid", group="bad.paid")
def ship_paid(delivery: Delivery) -> None:
    Shipment.objects.create(order=delivery.body["order"])


def arrange_paid() -> None:
    Order.objects.create(number="1")


def act_paid() -> None:
    pay_then_publish("1")


def check_paid() -> None:
    assert Shipment.objects.count() == Order.objects.filter(status="paid").count()


# 5.
# Fault: the mark "handled" and the points are two transactions, so a crash in between loses the points.


@subscriber("bad.points", group="bad.points", idempotent=False)
def give_points(delivery: Delivery) -> None:
    with transaction.atomic():
        _, new = Handled.objects.get_or_create(message=delivery.message_id)
    if new:
        with transaction.atomic():
            Account.objects.filter(owner=delivery.key).update(points=F("points") + delivery.body["points"])


def arrange_points() -> None:
    Account.objects.create(owner="ada")


def act_points() -> None:
    with transaction.atomic():
        publish("bad.points", {"points": 10}, key="ada")


def check_points() -> None:
    assert Account.objects.get(owner="ada").points == 10


# 6.
# Fault: each attempt has a new idempotency key, so the bank cannot recognise the repetition.


@subscriber("bad.charge", group="bad.charge", effects="outside")
def charge_order(delivery: ClaimedDelivery) -> None:
    order = Order.objects.get(number=delivery.key)
    payment = delivery.step("charge", outside.charges.call, f"{order.number}: {order.amount}", str(uuid4()))
    with delivery.finish():
        order.payment = payment
        order.status = "paid"
        order.save()


def arrange_charge() -> None:
    Order.objects.create(number="1", amount=250)


def act_charge() -> None:
    with transaction.atomic():
        publish("bad.charge", {}, key="1")


def check_charge() -> None:
    assert Order.objects.get(number="1").status == "paid"
    assert outside.charges.acts == ["1: 250"]


# 7.
# Fault: an interrupted transfer counts as done, although it may not have begun.


@subscriber("bad.transfer", group="bad.transfer", effects="outside")
def pay_back(delivery: ClaimedDelivery) -> None:
    with suppress(StepOutcomeUnknown):  # it was sent before
        delivery.step("transfer", outside.transfers.call, f"order {delivery.key}", once=True)
    with delivery.finish():
        Order.objects.filter(number=delivery.key).update(status="paid back")


def arrange_transfer() -> None:
    Order.objects.create(number="1")


def act_transfer() -> None:
    with transaction.atomic():
        publish("bad.transfer", {}, key="1")


def check_transfer() -> None:
    assert Order.objects.get(number="1").status == "paid back"
    assert outside.transfers.acts == ["order 1"]


# 8.
# Fault: two handlers at the same time read the same coupon, which is not locked, and both redeem it.


@subscriber("bad.coupon", group="bad.coupon")
def redeem_coupon(delivery: Delivery) -> None:
    coupon = Coupon.objects.get(code=delivery.body["coupon"])
    if coupon.left > 0:
        coupon.left -= 1
        coupon.save()
        Redemption.objects.create(coupon=coupon.code, order=delivery.key)


def arrange_coupon() -> None:
    Coupon.objects.create(code="spring", left=1)


def act_coupon() -> None:
    for number in ("1", "2"):
        with transaction.atomic():
            publish("bad.coupon", {"coupon": "spring"}, key=number)


def check_coupon() -> None:
    assert Redemption.objects.filter(coupon="spring").count() == 1
    assert Coupon.objects.get(code="spring").left == 0


# 9.
# Fault: the amounts of a basket are collected in the memory of the process, and a crash forgets them.

_amounts: dict[str, list[int]] = {}


@subscriber("bad.basket", group="bad.basket", threads=1)
def collect_basket(delivery: Delivery) -> None:
    basket = delivery.key
    amounts = _amounts.setdefault(basket, [])
    amounts.append(delivery.body["amount"])
    if len(amounts) == delivery.body["lines"]:
        Invoice.objects.create(basket=basket, total=sum(amounts))
        del _amounts[basket]


def arrange_basket() -> None:
    pass


def act_basket() -> None:
    for amount in (10, 20, 30):
        with transaction.atomic():
            publish("bad.basket", {"amount": amount, "lines": 3}, key="b1")


def check_basket() -> None:
    assert [invoice.total for invoice in Invoice.objects.filter(basket="b1")] == [60]


# 10.
# Fault: the compensation calls the bank without a key, so a crash before its commit refunds twice.

bad_trip = Saga("bad_trip", Trip, topic="bad.trips")


def refund_trip(trip: Trip) -> None:
    outside.refunds.call(f"{trip.guest}: {trip.charged}")
    trip.refunded = True
    trip.save()


@bad_trip.step(undo=refund_trip)
def charge_trip(trip: Trip) -> None:
    outside.charges.call(f"{trip.guest}: 100", key=f"trip {trip.pk}")
    trip.charged = 100
    trip.save()


@bad_trip.step()
def print_ticket(trip: Trip) -> None:
    raise StepRefused("the train is full")


def arrange_trip() -> None:
    pass


def act_trip() -> None:
    with transaction.atomic():
        bad_trip.start(Trip.objects.create(guest="ada"))


def check_trip() -> None:
    assert Trip.objects.get(guest="ada").refunded
    assert outside.refunds.acts == ["ada: 100"]


# 11.
# Fault: the thread writes with a connection of its own, so its row is not in the handler's transaction.


def make_label(number: str) -> None:
    try:
        Label.objects.create(order=number, text=f"order {number}")
    finally:
        connection.close()


@subscriber("bad.label", group="bad.label")
def pack_order(delivery: Delivery) -> None:
    thread = Thread(target=make_label, args=[delivery.key])
    thread.start()
    Order.objects.filter(number=delivery.key).update(status="packed")
    thread.join()


def arrange_label() -> None:
    Order.objects.create(number="1")


def act_label() -> None:
    with transaction.atomic():
        publish("bad.label", {}, key="1")


def check_label() -> None:
    assert Order.objects.get(number="1").status == "packed"
    assert Label.objects.filter(order="1").count() == 1


# 12.
# Fault: if the order comes first, the customer exists without a name, and the IntegrityError of the registration is
# taken for a second delivery.


@subscriber("bad.customers", group="bad.customers", threads=1)
def follow_customers(delivery: Delivery) -> None:
    if delivery.tag == "registered":
        try:
            with transaction.atomic():
                Customer.objects.create(email=delivery.key, name=delivery.body["name"])
        except IntegrityError:
            pass  # delivered before
    else:
        Customer.objects.get_or_create(email=delivery.key)
        Order.objects.create(number=delivery.body["order"], customer=delivery.key)


def arrange_customers() -> None:
    pass


def act_customers() -> None:
    with transaction.atomic():
        publish("bad.customers", {"name": "Ada"}, key="ada@example.org", tag="registered")
    with transaction.atomic():
        publish("bad.customers", {"order": "1"}, key="ada@example.org", tag="ordered")


def check_customers() -> None:
    assert Customer.objects.get(email="ada@example.org").name == "Ada"
    assert Order.objects.get(number="1").customer == "ada@example.org"


# 13.
# Fault: conflicts are ignored on the reference, which is new each time, so a second delivery adds the lines again.


@subscriber("bad.lines", group="bad.lines", idempotent=False)
def store_lines(delivery: Delivery) -> None:
    LineByReference.objects.bulk_create(
        [LineByReference(order=delivery.key, position=position) for position in range(delivery.body["lines"])],
        ignore_conflicts=True,
    )


def arrange_lines() -> None:
    pass


def act_lines() -> None:
    with transaction.atomic():
        publish("bad.lines", {"lines": 3}, key="1")


def check_lines() -> None:
    assert sorted(line.position for line in LineByReference.objects.filter(order="1")) == [0, 1, 2]


# 14.
# Fault: a crash leaves the lock, so the next attempt takes the order for locked and returns.


@subscriber("bad.locked", group="bad.locked")
def ship_under_lock(delivery: Delivery) -> None:
    name = f"order-{delivery.key}"
    if not outside.store.add(name):
        return  # another worker has this order
    Shipment.objects.create(order=delivery.key)
    outside.store.delete(name)


def arrange_locked() -> None:
    pass


def act_locked() -> None:
    with transaction.atomic():
        publish("bad.locked", {}, key="1")


def check_locked() -> None:
    assert Shipment.objects.filter(order="1").count() == 1


# 15.
# Fault: after a crash between two files the first one is gone, and every later attempt fails.


@subscriber("bad.document", group="bad.document")
def delete_document(delivery: Delivery) -> None:
    document = Document.objects.get(number=delivery.key)
    for name in document.files:
        (outside.documents() / name).unlink()
    document.delete()


def arrange_document() -> None:
    for name in ("a.pdf", "b.pdf"):
        (outside.documents() / name).write_text("text")
    Document.objects.create(number="1", files=["a.pdf", "b.pdf"])


def act_document() -> None:
    with transaction.atomic():
        publish("bad.document", {}, key="1")


def check_document() -> None:
    assert not Document.objects.filter(number="1").exists()
    assert list(outside.documents().iterdir()) == []


# 16.
# Fault: steps are named by their position among the parcels that are left, so the next attempt takes the result of
# another parcel's step for the result of this one, and skips a parcel.


def ship_parcel(parcel: int, key: str) -> None:
    outside.courier.call(f"parcel of order {Parcel.objects.get(pk=parcel).order}", key)
    Parcel.objects.filter(pk=parcel).update(shipped=True)


@subscriber("bad.parcels", group="bad.parcels", effects="outside")
def ship_parcels(delivery: ClaimedDelivery) -> None:
    waiting = Parcel.objects.filter(order=delivery.key, shipped=False).order_by("pk")
    for position, parcel in enumerate(waiting):
        delivery.step(f"ship {position}", ship_parcel, parcel.pk, delivery.step_key(f"parcel {parcel.pk}"))
    with delivery.finish():
        Order.objects.filter(number=delivery.key).update(status="shipped")


def arrange_parcels() -> None:
    Order.objects.create(number="1")
    for _ in range(3):
        Parcel.objects.create(order="1")


def act_parcels() -> None:
    with transaction.atomic():
        publish("bad.parcels", {}, key="1")


def check_parcels() -> None:
    assert Order.objects.get(number="1").status == "shipped"
    assert not Parcel.objects.filter(order="1", shipped=False).exists()
    assert len(outside.courier.acts) == 3


# 17.
# Fault: the step puts its result into a variable, which is empty if an earlier attempt has done the step.


@subscriber("bad.invoice", group="bad.invoice", effects="outside")
def write_invoice(delivery: ClaimedDelivery) -> None:
    answer: dict[str, str] = {}

    def call() -> None:
        answer["id"] = outside.invoices.call(f"order {delivery.key}", delivery.step_key("invoice"))

    delivery.step("invoice", call)
    with delivery.finish():
        Order.objects.filter(number=delivery.key).update(payment=answer.get("id", ""), status="invoiced")


def arrange_invoice() -> None:
    Order.objects.create(number="1")


def act_invoice() -> None:
    with transaction.atomic():
        publish("bad.invoice", {}, key="1")


def check_invoice() -> None:
    order = Order.objects.get(number="1")
    assert order.status == "invoiced"
    assert order.payment == "invoice-0"
    assert len(outside.invoices.acts) == 1


# 18.
# Fault: the topic has no order, and an older price that comes late overwrites the newer one.


@subscriber("bad.price", group="bad.price", threads=1)
def set_price(delivery: Delivery) -> None:
    Product.objects.filter(number=delivery.key).update(price=delivery.body["price"])


def arrange_price() -> None:
    Product.objects.create(number="p1", price=8)


def act_price() -> None:
    for price in (10, 12):
        with transaction.atomic():
            publish("bad.price", {"price": price}, key="p1")


def check_price() -> None:
    assert Product.objects.get(number="p1").price == 12


# 19.
# Fault: the saga proceeds in one transaction, and the payment is stored in another, so a crash in between loses it.

bad_tour = Saga("bad_tour", Trip, topic="bad.tours")


@bad_tour.step()
def ask_for_money(trip: Trip) -> StepAnswer:
    publish("bad.money", {"amount": 70}, key=trip.pk)
    return WAIT


@bad_tour.step()
def print_tour(trip: Trip) -> None:
    trip.ticket = f"ticket of {trip.guest}"
    trip.save(update_fields=["ticket"])


@subscriber("bad.money", group="bad.money", idempotent=False)
def take_money(delivery: Delivery) -> None:
    if bad_tour.proceed(int(delivery.key), at="ask_for_money"):
        Trip.objects.filter(pk=delivery.key).update(charged=delivery.body["amount"])


def arrange_tour() -> None:
    pass


def act_tour() -> None:
    with transaction.atomic():
        bad_tour.start(Trip.objects.create(guest="ada"))


def check_tour() -> None:
    trip = Trip.objects.get(guest="ada")
    assert trip.ticket == "ticket of ada"
    assert trip.charged == 70


# 20.
# Fault: the number of the attempt is taken for "has it been sent?", which a crash between text and commit disproves.


@subscriber("bad.text", group="bad.text")
def send_text(delivery: Delivery) -> None:
    Order.objects.filter(number=delivery.key).update(status="on its way")
    if delivery.attempt == 1:
        outside.texts.call(f"order {delivery.key} is on its way")


def arrange_text() -> None:
    Order.objects.create(number="1")


def act_text() -> None:
    with transaction.atomic():
        publish("bad.text", {}, key="1")


def check_text() -> None:
    assert Order.objects.get(number="1").status == "on its way"
    assert outside.texts.acts == ["order 1 is on its way"]
