"""Values from which on a condition is a warning, and from which on it is critical."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from outbox.broker.operations.conditions import Severity

_DAY: Final = 24 * 3600.0
_GIBIBYTE: Final = 2.0**30


@dataclass(frozen=True, slots=True)
class Threshold:
    """A warning from `warning` on, critical from `critical` on; None: never."""

    warning: float | None
    critical: float | None

    def judge(self, value: float | None) -> Severity | None:
        """Return the severity of a value; None when it is within the limits, or unknown."""
        if value is None:
            return None
        if self.critical is not None and value >= self.critical:
            return Severity.CRITICAL
        if self.warning is not None and value >= self.warning:
            return Severity.WARNING
        return None


def _limits(warning: float, critical: float | None, unit: str, meaning: str) -> Threshold:
    """A field with its default, unit and meaning; the table of the thresholds in docs/operations.md is made of them."""
    made: Any = field(default=Threshold(warning, critical), metadata={"unit": unit, "meaning": meaning})
    return made  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """All limits. Names have the units."""

    no_sequencer_seconds: Threshold = _limits(0, 15, "seconds", "since the last process led")
    no_worker_seconds: Threshold = _limits(
        10, 30, "seconds", "since the last consumer of a group left or its lease expired; a restart takes less"
    )
    tick_late_seconds: Threshold = _limits(10, 60, "seconds", "age of a decided or due message that is in no queue")
    pass_late_periods: Threshold = _limits(3, 10, "periods", "delay of check-back or pruning, in their periods")
    unanswered_seconds: Threshold = _limits(120, 900, "seconds", "age of a check that is due")
    parked_messages: Threshold = _limits(1, 100, "messages", "parked messages")
    lag_seconds: Threshold = _limits(60, 600, "seconds", "age of the oldest waiting message, per group and topic")
    lag_messages: Threshold = _limits(10_000, 1_000_000, "messages", "waiting messages, per group and topic")
    dead_letters: Threshold = _limits(1, 1000, "messages", "dead letters of a group")
    retry_share: Threshold = _limits(
        0.5,
        0.9,
        "share",
        "of the messages that a group finished in the last minute: those sent back for another attempt",
    )
    retry_messages: Threshold = _limits(100, 100, "messages", "sent back in a minute; below it, the share is ignored")
    retention_behind_seconds: Threshold = _limits(
        3600, _DAY, "seconds", "past the retention time: the oldest row of the log, a ledger or an inbox"
    )
    transaction_seconds: Threshold = _limits(300, 3600, "seconds", "age of a transaction that holds back vacuum")
    lock_seconds: Threshold = _limits(5, 60, "seconds", "wait of a session of the broker for a lock")
    space_bytes: Threshold = _limits(50 * _GIBIBYTE, None, "bytes", "size of the broker's tables")
    xid_age: Threshold = _limits(1e9, 1.8e9, "transactions", "age of the oldest row, towards the wrap-around at 2^31")
    sequence_share: Threshold = _limits(0.5, 0.9, "share", "used part of an identity column's numbers")
    replica_lag_bytes: Threshold = _limits(
        _GIBIBYTE / 4,
        4 * _GIBIBYTE,
        "bytes",
        "WAL that a replica has not replayed, or that is kept for a disconnected replica",
    )
    window_seconds: Threshold = _limits(_DAY, _DAY, "seconds", "how long an event (an incident, a death) is shown")
