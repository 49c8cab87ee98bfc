"""The payments' handlers."""

from __future__ import annotations

import logging
from decimal import Decimal
from typing import Final

from django.db.models import Sum

from outbox import Delivery
from outbox.contrib.django import ClaimedDelivery, subscriber
from outbox.contrib.limits import Limits
from sample_project.events import OrderPaid
from sample_project.payments import client
from sample_project.payments.models import Charge, Statement

logger = logging.getLogger(__name__)

# The provider's contract: four connections, and 40 charges per second for all processes of the shop together.
PROVIDER_LIMITS: Final = Limits(running=4, rate="40/s")


@subscriber(OrderPaid, group="payments", effects="outside", options=[PROVIDER_LIMITS], timeout_seconds=60)
def charge(delivery: ClaimedDelivery[OrderPaid]) -> None:
    """Charge a paid order once. If the process dies during the call, the next one repeats it with the same key."""
    paid = delivery.body
    number = delivery.step("charge", client.charge, paid.order_id, str(paid.amount), delivery.idempotency_key)
    with delivery.finish():
        Charge.objects.create(order_id=paid.order_id, number=number, amount=paid.amount)
    logger.info("order %d is charged", paid.order_id)


@subscriber("statement.due", group="payments.statement")
def statement(delivery: Delivery) -> None:
    """Every night, put the charges that no statement has into a new one, so that each charge is in one statement."""
    made = Statement.objects.create(charges=0, amount=Decimal())
    made.charges = Charge.objects.filter(statement=None).update(statement=made)
    made.amount = Charge.objects.filter(statement=made).aggregate(total=Sum("amount", default=Decimal()))["total"]
    made.save()
