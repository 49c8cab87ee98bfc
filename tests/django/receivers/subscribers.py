"""A subscriber whose messages become dead letters."""

from __future__ import annotations

from outbox import Delivery
from outbox.contrib.django import subscriber
from outbox.errors import PermanentError


@subscriber("payments", group="refusing")
def refuse(delivery: Delivery) -> None:
    """Give every message up."""
    raise PermanentError(f"no account for {delivery.key}")
