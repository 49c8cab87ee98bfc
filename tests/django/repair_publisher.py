"""How the rows of these tests are published again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outbox.contrib.django import message
from outbox.message import Message


@dataclass(frozen=True)
class OrderPlaced:
    """The event of a row. A test declares it."""

    number: str


def order(row: Mapping[str, Any]) -> Message:
    """The message of a row of shop_order, on the topic orders."""
    return message("orders", {"number": row["number"]}, key=row["number"])


def step(row: Mapping[str, Any]) -> Message:
    """The same, on a FIFO topic."""
    return message("steps", {"number": row["number"]}, key=row["number"])


def broken(row: Mapping[str, Any]) -> Message:
    """Fails."""
    raise RuntimeError("no price")


def elsewhere(row: Mapping[str, Any]) -> Message:
    """A message of another key."""
    return message("orders", {}, key="another")


def typed(row: Mapping[str, Any]) -> Message:
    """The message of a row as an event."""
    return message(OrderPlaced(number=row["number"]), key=row["number"])
