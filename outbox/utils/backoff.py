"""Exponential backoff: how long to wait after failures in a row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Backoff:
    """Pauses in seconds: `first_seconds`, then `factor` times as long each time, up to `longest_seconds`.

    A failure after a run of at least `healthy_seconds` starts again with the first pause.
    """

    first_seconds: float
    longest_seconds: float
    factor: float = 2.0
    healthy_seconds: float = 0.0

    def pause_seconds(self, failures: int) -> float:
        """The pause after this many failures in a row (from 1)."""
        # Limit the exponent: the float power overflows after about a thousand failures in a row.
        return float(min(self.longest_seconds, self.first_seconds * self.factor ** min(failures - 1, 30)))

    def failures_in_a_row(self, before: int, *, ran_seconds: float) -> int:
        """The number of failures in a row, this one included, after a run of `ran_seconds`."""
        return 1 if ran_seconds >= self.healthy_seconds else before + 1
