"""A payment service outside of every database. The test that runs a case connects it to something durable."""

from __future__ import annotations

from collections.abc import Callable


class Service:
    """Where the calls are recorded."""

    record: Callable[[str, object], None]
    recorded: Callable[[str], list[object]]


def charge(number: int) -> None:
    """Charge a card, once per call."""
    Service.record("charge", number)


def charges() -> list[object]:
    """Return the numbers that were charged, a number as often as it was charged."""
    return Service.recorded("charge")


def charge_once(number: int | str) -> None:
    """Charge a card; the service ignores a number or key that it knows."""
    if number not in Service.recorded("charge"):
        Service.record("charge", number)
