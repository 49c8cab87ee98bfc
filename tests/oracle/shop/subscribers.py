"""One handler of each kind. Each call writes `begin`, then `end` or `fail`, and its effect into the table."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from outbox import Delivery, RetryPolicy
from outbox.contrib.django import ClaimedDelivery, publish, subscriber
from outbox.contrib.limits import Limits
from outbox.contrib.saga.steps import Saga, StepRefused
from outbox.errors import PermanentError
from tests.oracle.lines import write
from tests.oracle.shop.models import Booking, Effect, Order

SOON = RetryPolicy(delays_seconds=[0.3], max_attempts=40)
RUNNING = int(os.environ["ORACLE_RUNNING"])


@contextmanager
def _call(group: str, delivery: Delivery, **fields: object) -> Iterator[str]:
    name = delivery.body["name"]
    write("begin", group=group, name=name, attempt=delivery.attempt, **fields)
    try:
        yield name
    except BaseException as error:
        write("fail", group=group, name=name, error=type(error).__name__)
        raise
    write("end", group=group, name=name)


def _chance(*parts: object) -> float:
    """The same number below 1 for the same parts, in every process."""
    return zlib.crc32(repr(parts).encode()) % 1000 / 1000


@subscriber("orders", group="ship", retry=SOON)
def ship(delivery: Delivery) -> None:
    """The plain handler."""
    with _call("ship", delivery) as name:
        Effect.objects.create(group="ship", name=name)


@subscriber("orders", group="points", retry=SOON)
def points(delivery: Delivery) -> None:
    """Writes first, then fails in one of four calls. Some calls are slow, while others overtake them."""
    with _call("points", delivery) as name:
        Effect.objects.create(group="points", name=name)
        chance = _chance("points", name, delivery.attempt)
        if chance < 0.1:
            time.sleep(chance if chance > 0.04 else 1 + chance * 50)
        if chance > 0.75:
            raise RuntimeError("a quarter of the calls fail")


@subscriber("orders", group="charge", effects="outside", retry=SOON)
def charge(delivery: ClaimedDelivery) -> None:
    """Calls a provider that honours the key, then writes."""
    with _call("charge", delivery) as name:
        chance = _chance("charge", name, delivery.attempt)
        key = delivery.step("charge", _provider, name, delivery.step_key("charge"), chance)
        if chance > 0.85:
            raise RuntimeError("fails after the charge")
        with delivery.finish():
            Effect.objects.create(group="charge", name=name)
            write("charged", name=name, key=key)


def _provider(name: str, key: str, chance: float) -> str:
    write("charge", name=name, key=key)
    time.sleep(chance / 10)
    if chance < 0.1:
        raise RuntimeError("the provider fails")
    return key


@subscriber("orders", group="mail", options=[Limits(running=RUNNING)], retry=SOON)
def mail(delivery: Delivery) -> None:
    """One or two calls at once, in all processes."""
    with _call("mail", delivery, limit=RUNNING) as name:
        # Long enough that a call too many meets the others.
        time.sleep(0.01 + _chance("mail", name) / 10)
        Effect.objects.create(group="mail", name=name)


@subscriber("orders", group="bill", retry=SOON)
def bill(delivery: Delivery) -> None:
    """Publishes again, in the transaction of its effect."""
    with _call("bill", delivery) as name:
        publish("invoices", {"name": name}, key=name)
        Effect.objects.create(group="bill", name=name)
        if _chance("bill", name, delivery.attempt) > 0.9:
            raise RuntimeError("a tenth of the calls fail")


@subscriber("invoices", group="books", retry=SOON)
def books(delivery: Delivery) -> None:
    """The end of a chain."""
    with _call("books", delivery) as name:
        Effect.objects.create(group="books", name=name)


@subscriber("steps", group="track", mode="key_ordered", suspend_seconds=0.2)
def track(delivery: Delivery) -> None:
    """In the order of commits, although one call in ten fails."""
    number = delivery.body["number"] or Order.objects.get(name=delivery.body["name"]).number
    with _call("track", delivery, key=delivery.key, number=number) as name:
        Effect.objects.create(group="track", name=name, number=number)
        if _chance("track", name, time.time()) > 0.9:
            raise RuntimeError("a tenth of the calls fail")


@subscriber("later", group="remind", retry=SOON)
def remind(delivery: Delivery) -> None:
    """Not before its time."""
    with _call("remind", delivery, due=delivery.body["due"]) as name:
        Effect.objects.create(group="remind", name=name)


@subscriber("orders", group="audit", filter="poison = 'yes'", retry=SOON)
def audit(delivery: Delivery) -> None:
    """Gives every message up that it gets."""
    with _call("audit", delivery):
        raise PermanentError("poison")


booking = Saga("booking", Booking, topic="bookings")


def release(record: Booking) -> None:
    """Undo the reservation."""
    write("saga", name=record.name, step="release")
    record.reserved -= 1
    record.save()


@booking.step(undo=release, retry=SOON)
def reserve(record: Booking) -> None:
    """The first step."""
    write("saga", name=record.name, step="reserve")
    record.reserved += 1
    record.save()


@booking.step(retry=SOON)
def confirm(record: Booking) -> None:
    """The second step, which half of the bookings refuse."""
    write("saga", name=record.name, step="confirm")
    record.confirmed += 1
    record.save()
    if record.refused:
        # The refusal takes back what the step has written.
        raise StepRefused("fully booked")
