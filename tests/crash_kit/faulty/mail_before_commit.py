"""The mail is sent inside the transaction, so a second attempt sends a second mail."""

from __future__ import annotations

from django.core import mail
from django.core.mail import send_mail

from outbox import Delivery
from outbox.contrib.django import subscriber
from tests.crash_kit.shop.models import Payment
from tests.crash_kit.writing import place

TOPIC = GROUP = "mail_before_commit"
BREAKS = "send_mail("


@subscriber(TOPIC, group=GROUP)
def handle(delivery: Delivery) -> None:
    Payment.objects.create(number=delivery.body["number"])
    send_mail("paid", str(delivery.body["number"]), "shop@example.org", ["ann@example.org"])


def scenario() -> None:
    place(TOPIC, 1, 2)


def check() -> None:
    bodies = [item.body for item in mail.outbox]
    assert len(bodies) == len(set(bodies))
