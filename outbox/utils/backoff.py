"""Exponential backoff: the pause grows with each failure in a row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Backoff:
    """The pauses between attempts: `first_seconds`, then each `factor` times as long, up to `longest_seconds`.

    If an attempt worked for at least `healthy_seconds` before it failed, the next pause is `first_seconds` again.
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
        """Return the number of failures in a row, including the failure after `ran_seconds` of work."""
        return 1 if ran_seconds >= self.healthy_seconds else before + 1
