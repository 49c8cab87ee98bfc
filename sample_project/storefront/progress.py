"""The progress of an order, gathered from the four apps."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sample_project.cart.models import Clearance
from sample_project.logistics.models import Shipment
from sample_project.orders.models import Order
from sample_project.points import services as points
from sample_project.points.models import Entry


@dataclass(frozen=True, kw_only=True)
class Step:
    """One of the four states. `after_milliseconds` counts from the payment; None until it has arrived."""

    name: str
    app: str
    text: str
    after_milliseconds: int | None = None
    done: bool = False


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The four states of an order, in the order of the page."""

    steps: list[Step]

    @property
    def complete(self) -> bool:
        """Whether all four have arrived."""
        return all(step.done for step in self.steps)


def progress(order: Order) -> Progress:
    """Read from every app its part of the order."""
    if order.paid_at is None:
        paid = Step(name="Payment", app="orders", text="Not paid yet")
    else:
        paid = Step(name="Payment", app="orders", text="Received", after_milliseconds=0, done=True)
    return Progress(steps=[paid, _shipment(order), _points(order), _cart(order)])


def _shipment(order: Order) -> Step:
    shipment = Shipment.objects.filter(order_id=order.pk).first()
    if shipment is None:
        return Step(name="Shipment", app="logistics", text="No parcel yet")
    return _done("Shipment", "logistics", f"Parcel {shipment.pk} is on its way", order, shipment.created_at)


def _points(order: Order) -> Step:
    entry = Entry.objects.filter(order_id=order.pk).first()
    if entry is None:
        return Step(name="Points", app="points", text="None credited yet")
    text = f"{entry.points} credited, {points.balance(order.customer)} in all"
    return _done("Points", "points", text, order, entry.created_at)


def _cart(order: Order) -> Step:
    clearance = Clearance.objects.filter(order_id=order.pk).first()
    if clearance is None:
        return Step(name="Cart", app="cart", text="Still holds these articles")
    return _done("Cart", "cart", "Cleared", order, clearance.created_at)


def _done(name: str, app: str, text: str, order: Order, at: datetime) -> Step:
    # A message about an unpaid order would be a phantom: show it, do not hide it behind an assertion.
    after = (at - order.paid_at).total_seconds() * 1000 if order.paid_at else None
    return Step(name=name, app=app, text=text, after_milliseconds=None if after is None else round(after), done=True)
