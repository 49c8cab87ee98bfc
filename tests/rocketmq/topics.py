"""The topics of a test's project, as its settings declare them: orders, their steps, and what is delivered later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final


def declared(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """OUTBOX['TOPICS'] for the three names."""
    orders, steps, later = names
    return {
        orders: {"queue_count": 2},
        steps: {"queue_count": 2},
        later: {"queue_count": 2, "types": ["NORMAL", "DELAY"]},
    }


STEPS: Final = ("FIFO", "TRANSACTION")
LATER: Final = ("NORMAL", "DELAY", "TRANSACTION")
# A lease is at least three sends long, so the next relay waits for at most six seconds after a kill.
SEND_SECONDS: Final = 2
LEASE_SECONDS: Final = 2


def relayed(url: str, steps: str, later: str) -> dict[str, Any]:
    """The keys of OUTBOX for the two topics of the relay's tests."""
    return {
        "BROKER": url,
        "PRODUCER_GROUP": "shop",
        "SEND_TIMEOUT_SECONDS": SEND_SECONDS,
        "LEASE_SECONDS": LEASE_SECONDS,
        "TOPICS": {
            steps: {"types": list(STEPS), "queue_count": 2},
            later: {"types": list(LATER), "queue_count": 2},
        },
    }
