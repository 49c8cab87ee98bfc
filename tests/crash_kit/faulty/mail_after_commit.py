"""The mail is sent by on_commit, and a crash between COMMIT and on_commit loses it."""

from __future__ import annotations

from django.core import mail
from django.core.mail import send_mail
from django.db import transaction

from outbox import Delivery
from outbox.contrib.django import subscriber
from tests.crash_kit.shop.models import Payment
from tests.crash_kit.writing import place

TOPIC = GROUP = "mail_after_commit"
BREAKS = "Payment.objects.create("


@subscriber(TOPIC, group=GROUP)
def handle(delivery: Delivery) -> None:
    Payment.objects.create(number=delivery.body["number"])
    transaction.on_commit(
        lambda: send_mail("paid", str(delivery.body["number"]), "shop@example.org", ["ann@example.org"])
    )


def scenario() -> None:
    place(TOPIC, 1, 2)


def check() -> None:
    assert {int(str(item.body)) for item in mail.outbox} == set(Payment.objects.values_list("number", flat=True))
