"""A stand-in for a payment provider: the card's number decides the result."""

from __future__ import annotations

from decimal import Decimal
from typing import Final

GOOD_CARD: Final = "4000 0000 0000 0077"
EMPTY_CARD: Final = "4000 0000 0000 9995"


class Declined(Exception):
    """The provider refused the payment; nothing was charged."""


def charge(card: str, amount: Decimal) -> None:
    """Charge `amount` euro. Raises Declined."""
    if card != GOOD_CARD:
        raise Declined(f"the card ending in {card[-4:]} was declined for {amount} euro")
