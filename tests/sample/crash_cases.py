"""A crash test of the sample's own handlers; run by test_crashes.py."""

from __future__ import annotations

from decimal import Decimal
from typing import Final

import pytest

from outbox.contrib.crash_kit.kit import CrashKit
from sample_project.cart.models import Clearance
from sample_project.income.models import CountedOrder, EnrichedOrder, ShownMinute, Window
from sample_project.logistics.models import Shipment
from sample_project.orders import gateway, services
from sample_project.orders.models import Order, Status
from sample_project.payments import client
from sample_project.payments.models import Charge
from sample_project.points.models import Entry

pytest_plugins = ["outbox.contrib.crash_kit.pytest_plugin"]

# All groups but offers.mail: its limit of one mail a second would make the runs wait.
GROUPS: Final = (
    *("orders", "logistics", "points", "cart", "payments", "payments.statement", "offers"),
    *("income.enrich", "income.windows", "income.chart"),
)


def test_an_order_reaches_every_app_once(outbox_crashes: CrashKit, monkeypatch: pytest.MonkeyPatch) -> None:
    def charge(order_id: int, amount: str, idempotency_key: str) -> str:
        outbox_crashes.record("charge", idempotency_key)
        return f"ch_{order_id}"

    monkeypatch.setattr(client, "charge", charge)

    def scenario() -> None:
        line = services.Line(product_slug="tea", name="Tea", unit_price=Decimal(20), quantity=2)
        order = services.place_order("ann", [line])
        services.pay(order.pk, gateway.GOOD_CARD)

    def check() -> None:
        paid = sorted(Order.objects.exclude(status=Status.NEW).values_list("pk", flat=True))
        assert not Order.objects.filter(status=Status.PAID).exists()
        for model in (Shipment, Entry, Clearance, EnrichedOrder, CountedOrder, Charge):
            assert sorted(model.objects.values_list("order_id", flat=True)) == paid, model
        # The provider may be asked twice, but with one key per order.
        assert len(set(outbox_crashes.recorded("charge"))) == len(paid)
        assert list(Window.objects.values_list("orders", flat=True)) == [1] * len(paid)
        assert list(ShownMinute.objects.values()) == list(Window.objects.values())

    outbox_crashes(scenario, check, groups=GROUPS)
    assert outbox_crashes.runs > 30
