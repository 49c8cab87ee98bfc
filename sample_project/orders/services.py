"""Placing and paying orders."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from django.db import transaction
from django.utils import timezone

from outbox.contrib.django import transactional_message
from sample_project import request_id
from sample_project.events import OrderPaid
from sample_project.orders import gateway
from sample_project.orders.models import Order, OrderLine, Status

logger = logging.getLogger(__name__)


class AlreadyPaid(Exception):
    """The order was paid before; nothing was charged."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One article to be ordered; the price is in euro."""

    product_slug: str
    name: str
    unit_price: Decimal
    quantity: int


def place_order(customer: str, lines: Sequence[Line]) -> Order:
    """Store a new order. Raises ValueError if it has no lines."""
    if not lines:
        raise ValueError("an order needs at least one line")
    with transaction.atomic():
        total = sum((line.unit_price * line.quantity for line in lines), Decimal())
        order = Order.objects.create(customer=customer, total=total)
        OrderLine.objects.bulk_create(
            OrderLine(
                order=order,
                product_slug=line.product_slug,
                name=line.name,
                unit_price=line.unit_price,
                quantity=line.quantity,
            )
            for line in lines
        )
    return order


def paid_event(order: Order) -> OrderPaid:
    """The event of a paid order."""
    assert order.paid_at is not None
    return OrderPaid.of(order_id=order.pk, customer=order.customer, total=order.total, paid_at=order.paid_at)


@transactional_message(OrderPaid, body=lambda order_id, result: paid_event(result), headers=request_id.headers)
def mark_paid(order_id: int) -> Order:
    """Turn a new order into a paid one; `order.paid` is delivered if and only if this is committed."""
    order = Order.objects.select_for_update().get(pk=order_id)
    if order.status != Status.NEW:
        raise AlreadyPaid(f"order {order_id} is {order.get_status_display().lower()} already")
    order.status = Status.PAID
    order.paid_at = timezone.now()
    order.save(update_fields=["status", "paid_at"])
    return order


def pay(order_id: int, card: str) -> Order:
    """Pay an order: the row, the message and the authorisation together or not at all.

    The card is asked last, so that nothing is reserved for an order that cannot be stored. Raises gateway.Declined or
    AlreadyPaid. Then the order stays as it was, and the message that was already stored is rolled back.
    """
    with transaction.atomic():
        order = mark_paid(order_id)
        gateway.authorise(card, order.total)
    logger.info("order %d is paid", order_id)
    return order
