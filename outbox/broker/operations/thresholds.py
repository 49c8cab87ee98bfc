"""Values from which on a condition is a warning, and from which on it is critical."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """All limits. Names have the units; `window_seconds`: how long an event (an incident, a death) is shown.

    `no_sequencer`: since the last process led. `no_worker`: since the last consumer of the group left or its lease
    expired; an ordinary restart takes less. `tick_late`: a decided or due message that is in no queue yet.
    `pass_late_periods`: check-back or pruning, in periods. `unanswered`: a check that is due. `lag`: per group and
    topic. `retry_share`: the share of messages sent back, among those that a group finished in the last minute
    (from `retry_messages` on). `retention_behind`: the time that rows stay past their retention, in the log, the
    ledgers and the inboxes. `transaction`: a session whose transaction holds back vacuum. `lock`: a session of the
    broker that waits. `space`: the broker's tables. `xid_age`: the age in transaction ids; they wrap around at 2^31.
    `sequence_share`: the used share of an identity column. `replica_lag`: WAL that a replica has not replayed, or that
    is kept for a disconnected replica.
    """

    no_sequencer_seconds: Threshold = Threshold(0, 15)
    no_worker_seconds: Threshold = Threshold(10, 30)
    tick_late_seconds: Threshold = Threshold(10, 60)
    pass_late_periods: Threshold = Threshold(3, 10)
    unanswered_seconds: Threshold = Threshold(120, 900)
    parked_messages: Threshold = Threshold(1, 100)
    lag_seconds: Threshold = Threshold(60, 600)
    lag_messages: Threshold = Threshold(10_000, 1_000_000)
    dead_letters: Threshold = Threshold(1, 1000)
    retry_share: Threshold = Threshold(0.5, 0.9)
    retry_messages: Threshold = Threshold(100, 100)
    retention_behind_seconds: Threshold = Threshold(3600, _DAY)
    transaction_seconds: Threshold = Threshold(300, 3600)
    lock_seconds: Threshold = Threshold(5, 60)
    space_bytes: Threshold = Threshold(50 * _GIBIBYTE, None)
    xid_age: Threshold = Threshold(1e9, 1.8e9)
    sequence_share: Threshold = Threshold(0.5, 0.9)
    replica_lag_bytes: Threshold = Threshold(_GIBIBYTE / 4, 4 * _GIBIBYTE)
    window_seconds: Threshold = Threshold(_DAY, _DAY)
