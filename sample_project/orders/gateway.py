"""Asks whether a card can pay: its number decides. The amount is charged later, by the app payments."""

from __future__ import annotations

from decimal import Decimal
from typing import Final

GOOD_CARD: Final = "4000 0000 0000 0077"
EMPTY_CARD: Final = "4000 0000 0000 9995"


class Declined(Exception):
    """The card cannot pay; nothing was charged."""


def authorise(card: str, amount: Decimal) -> None:
    """Reserve `amount` euro on the card. Raises Declined."""
    if card != GOOD_CARD:
        raise Declined(f"the card ending in {card[-4:]} was declined for {amount} euro")
