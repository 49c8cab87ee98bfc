"""Exponential backoff: the pause grows with each failure in a row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Backoff:
    """Pauses in seconds. The first is `first_seconds`. Each next pause is `factor` times as long, up to a maximum.

    The maximum is `longest_seconds`. After a run of at least `healthy_seconds`, the next pause is `first_seconds` long
    again.
    """

    first_seconds: float
    longest_seconds: float
    factor: float = 2.0
    healthy_seconds: float = 0.0

    def pause_seconds(self, failures: int) -> float:
        """Return the pause after this number of failures in a row (from 1)."""
        # Limit the exponent: the float power overflows after about a thousand failures in a row.
        return float(min(self.longest_seconds, self.first_seconds * self.factor ** min(failures - 1, 30)))

    def failures_in_a_row(self, before: int, *, ran_seconds: float) -> int:
        """Return the number of failures in a row, including one that ended a run of `ran_seconds`."""
        return 1 if ran_seconds >= self.healthy_seconds else before + 1
