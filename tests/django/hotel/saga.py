from __future__ import annotations

from datetime import timedelta

from outbox.contrib.django import publish
from outbox.contrib.saga.steps import WAIT, Saga, StepAnswer, StepRefused
from tests.django.hotel.models import Booking, Room

booking = Saga("booking", Booking, topic="bookings")


def release_room(record: Booking) -> None:
    Room.objects.filter(pk=record.room.pk).update(free=True)


@booking.step(undo=release_room)
def reserve_room(record: Booking) -> None:
    if not Room.objects.filter(pk=record.room.pk, free=True).update(free=False):
        raise StepRefused("the room is taken")


def refund(record: Booking) -> None:
    if record.charged:
        publish("refunds", {"guest": record.guest, "amount": record.charged}, key=record.guest)
        record.charged = 0
        record.save()


@booking.step(undo=refund, within=timedelta(minutes=30))
def ask_for_payment(record: Booking) -> StepAnswer:
    publish("invoices", {"booking": record.pk, "guest": record.guest}, key=record.guest)
    return WAIT


@booking.step()
def issue_key(record: Booking) -> None:
    if record.guest == "nobody":
        raise StepRefused("there is no guest")
    publish("keys", {"booking": record.pk}, key=record.guest)
