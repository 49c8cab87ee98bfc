"""`order.paid` as it was before version 2, for processes of a deployment that has not reached them yet."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Self

from outbox.events import event


@event("order.paid", version=1, key="order_id")
@dataclass(frozen=True, kw_only=True)
class OrderPaid:
    """An order is paid. `total` is in euro."""

    order_id: int
    customer: str
    total: Decimal
    paid_at: datetime

    @property
    def amount(self) -> Decimal:
        """The total under its later name, so that one text of the handlers serves both versions."""
        return self.total

    @classmethod
    def of(cls, *, order_id: int, customer: str, total: Decimal, paid_at: datetime) -> Self:
        """Make the event of an order, whose total is in euro."""
        return cls(order_id=order_id, customer=customer, total=total, paid_at=paid_at)
