"""The charges of a run, as the payment provider counts them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, LiteralString
from urllib.request import urlopen

import psycopg

from sample_project.provider import PATH, Charge

# A charge is interrupted only if its answer is at least this far away. Otherwise the answer could come before the kill.
_LEAST_LEFT_SECONDS: Final = 1.0

_STATEMENTS: Final[LiteralString] = "SELECT charges FROM payments_statement"


@dataclass(frozen=True, kw_only=True)
class PaymentKill:
    """A consumer process was killed before it had the answer about a charge."""

    number: str
    order: int


def read(url: str) -> list[Charge]:
    """All charges, the oldest first."""
    with urlopen(f"{url}{PATH}", timeout=10) as answer:
        return [Charge(**charge) for charge in json.load(answer)]


def unanswered(charges: Sequence[Charge]) -> Charge | None:
    """A charge that the provider has made and will not answer soon."""
    now = time.time()
    return next((charge for charge in charges if charge.slow_until - now >= _LEAST_LEFT_SECONDS), None)


def statements(orders: psycopg.Connection) -> list[int]:
    """The number of charges in each statement."""
    return [charges for (charges,) in orders.execute(_STATEMENTS)]
