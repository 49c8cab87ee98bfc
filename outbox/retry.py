"""The retry policy: the waits before a failed message is tried again, and the number of attempts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from outbox import names
from outbox.errors import ConfigurationError

# RocketMQ's retry schedule for consumers. The first retry is after 10 s, and the sixteenth attempt is the last.
DEFAULT_DELAYS_SECONDS = (10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)

# The broker counts no more attempts of a message: its columns are smallints.
MAX_ATTEMPTS: Final = 30_000


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """The waits between attempts, and the number of attempts.

    `delays_seconds[i]` is the wait before attempt i + 2. If there are more waits than delays, each further wait is as
    long as the last delay. `max_attempts` includes the first delivery. If `max_attempts` is None, the number of
    attempts has no limit.
    """

    delays_seconds: Sequence[float] = DEFAULT_DELAYS_SECONDS
    max_attempts: int | None = 16

    def __post_init__(self) -> None:
        delays: object = self.delays_seconds
        if (
            not isinstance(delays, Sequence)
            or not delays
            or not all(names.is_seconds(delay, names.MAX_DELAY_SECONDS) for delay in delays)
        ):
            raise ConfigurationError(
                f"RetryPolicy(delays_seconds={delays!r}): give at least one number of seconds, each from 0 to "
                f"{names.MAX_DELAY_SECONDS:,} (366 days)."
            )
        if self.max_attempts is not None and not names.is_whole(self.max_attempts, 1, MAX_ATTEMPTS):
            raise ConfigurationError(
                f"RetryPolicy(max_attempts={self.max_attempts!r}): give a whole number from 1 to {MAX_ATTEMPTS:,}, or "
                "None for no limit."
            )

    def exhausted(self, attempt: int) -> bool:
        """Whether `attempt` (from 1) was the last allowed attempt."""
        return self.max_attempts is not None and attempt >= self.max_attempts

    def delay_seconds(self, attempt: int) -> float:
        """Return the wait in seconds after the failed attempt with the number `attempt` (from 1)."""
        return self.level_seconds(attempt)

    def level_seconds(self, level: int) -> float:
        """Return the wait of a delay level (from 1) in seconds.

        A level after the end of the list counts as the last level.
        """
        return self.delays_seconds[min(max(level, 1), len(self.delays_seconds)) - 1]


# -- waiting for newer code ------------------------------------------------------------------------

_SHORTEST_WAIT_SECONDS: Final = 1.0
LONGEST_WAIT_SECONDS: Final = 60.0


def code_wait_seconds(now: datetime, born_at: datetime) -> float:
    """Return how long a message that only newer code can read waits until it is read again.

    The wait is half of the message's age, so it grows without a count of attempts.
    """
    age = (now - born_at).total_seconds()
    return min(max(_SHORTEST_WAIT_SECONDS, age / 2), LONGEST_WAIT_SECONDS)
