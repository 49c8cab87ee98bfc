"""The offers' handlers."""

from __future__ import annotations

from datetime import timedelta

from django.core.mail import send_mail

from outbox import Delivery
from outbox.contrib.django import ClaimedDelivery, publish, subscriber
from outbox.contrib.limits import Limits
from outbox.contrib.unique import Unique
from sample_project import request_id
from sample_project.events import OrderPaid


@subscriber(OrderPaid, group="offers")
def make(delivery: Delivery[OrderPaid]) -> None:
    """Make an offer to a customer: one a day, and worthless after an hour."""
    customer = delivery.body.customer
    publish(
        "offer.made",
        {"customer": customer},
        Unique(customer, within=timedelta(days=1)),
        key=customer,
        headers=request_id.headers(),
        timeout=timedelta(hours=1),
    )


# The mail service takes one mail a second from all processes of the shop together.
@subscriber("offer.made", group="offers.mail", effects="outside", options=[Limits(rate="1/s")])
def mail(delivery: ClaimedDelivery) -> None:
    """Mail an offer. If the process dies during the call, the customer may get the mail twice, which does no harm."""
    address = f"{delivery.body['customer']}@example.org"
    text = "Order again within an hour of your last order, and we deliver for free."
    delivery.step("mail", send_mail, "Your next letter travels for free", text, None, [address])
