"""A trigger of the database writes a row beside each order; a row of both was there before the scenario."""

from __future__ import annotations

from django.db import connection

from outbox import Delivery
from outbox.contrib.django import subscriber
from tests.crash_kit.shop.models import Order, OrderLine, Payment
from tests.crash_kit.writing import orders, place

TOPIC = GROUP = "audit_trigger"

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


def prepare() -> None:
    with connection.cursor() as cursor:
        cursor.execute(_TRIGGER)
    Order.objects.create(number=1, status="audited")


@subscriber(TOPIC, group=GROUP)
def handle(delivery: Delivery) -> None:
    Payment.objects.create(number=delivery.body["number"])


def scenario() -> None:
    place(TOPIC, 2)


def check() -> None:
    assert list(OrderLine.objects.values_list("number", flat=True)) == [1]
    assert sorted([1, *Payment.objects.values_list("number", flat=True)]) == orders()
