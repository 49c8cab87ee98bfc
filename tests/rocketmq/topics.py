"""The topics of a test's project, as its settings declare them: orders, their steps, and what is delivered later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def declared(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """OUTBOX['TOPICS'] for the three names."""
    orders, steps, later = names
    return {
        orders: {"queue_count": 2},
        steps: {"queue_count": 2},
        later: {"queue_count": 2, "types": ["NORMAL", "DELAY"]},
    }
