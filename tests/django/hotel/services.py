from __future__ import annotations

from django.db import transaction

from tests.django.hotel.models import Booking, Room
from tests.django.hotel.saga import booking


def book(room: Room, guest: str) -> Booking:
    with transaction.atomic():
        record = Booking.objects.create(room=room, guest=guest)
        booking.start(record)
    return record


def paid(booking_id: int, amount: int) -> bool:
    with transaction.atomic():
        if not booking.proceed(booking_id, at="ask_for_payment"):
            return False  # too late, or paid before: the service that took the money gives it back
        Booking.objects.filter(pk=booking_id).update(charged=amount)
    return True
