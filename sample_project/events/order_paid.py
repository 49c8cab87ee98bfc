"""`order.paid` today: version 2 has a currency."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, Self

from outbox.events import event, upcast


@event("order.paid", version=2, key="order_id")
@dataclass(frozen=True, kw_only=True)
class OrderPaid:
    """An order is paid. `currency` is the ISO code of the currency of `amount`."""

    order_id: int
    customer: str
    amount: Decimal
    currency: str
    paid_at: datetime

    @classmethod
    def of(cls, *, order_id: int, customer: str, total: Decimal, paid_at: datetime) -> Self:
        """Make the event of an order, whose total is in euro."""
        return cls(order_id=order_id, customer=customer, amount=total, currency="EUR", paid_at=paid_at)


@upcast("order.paid", 1)
def with_currency(body: dict[str, Any]) -> dict[str, Any]:
    """Version 1 had the amount as `total`, always in euro."""
    rest = dict(body)
    return {"amount": rest.pop("total"), "currency": "EUR", **rest}
