"""Conditions: what an operator should know of, in one vocabulary for command, exit code, metric, alert and page."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

# What a condition names at most; `count` says how much there is.
EVIDENCE: Final = 20

Fact = Mapping[str, str | int | float | None]
Judged = tuple["Severity | None", Fact]


class Severity(enum.IntEnum):
    """How bad; also the exit code of the status command and the value of the metric."""

    OK = 0
    WARNING = 1
    """It needs attention, but every promise is kept in time."""
    CRITICAL = 2
    """Messages wait, or a promise is in danger."""


@dataclass(frozen=True, slots=True)
class ConditionKind:
    """What a condition of this name means, and what to do."""

    meaning: str
    next_step: str


@dataclass(frozen=True, slots=True)
class Condition:
    """One that holds. `evidence` names groups, queues, messages or sessions, at most twenty of `count`."""

    name: str
    severity: Severity
    evidence: Sequence[Fact]
    count: int

    @property
    def meaning(self) -> str:
        """What it means, in a sentence."""
        return CATALOGUE[self.name].meaning

    @property
    def next_step(self) -> str:
        """What to do."""
        return CATALOGUE[self.name].next_step

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            **dataclasses.asdict(self),
            "severity": self.severity.name.lower(),
            "meaning": self.meaning,
            "next_step": self.next_step,
        }


@dataclass(frozen=True, slots=True)
class ConditionReport:
    """All conditions that hold, the worst first.

    `is_complete` is False if the broker could not be asked: then a condition that is not listed is unknown.
    """

    conditions: Sequence[Condition]
    is_complete: bool = True

    @property
    def severity(self) -> Severity:
        """The worst."""
        return max((condition.severity for condition in self.conditions), default=Severity.OK)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "severity": self.severity.name.lower(),
            "complete": self.is_complete,
            "conditions": [condition.as_json() for condition in self.conditions],
        }


def condition(name: str, judged: Iterable[Judged]) -> list[Condition]:
    """One condition of all that was judged to be bad, the worst first; none when nothing was."""
    bad = [(severity, fact) for severity, fact in judged if severity]
    if not bad:
        return []
    bad.sort(key=lambda one: -one[0])
    return [Condition(name, bad[0][0], [fact for _, fact in bad[:EVIDENCE]], len(bad))]


def worst_first(conditions: Iterable[Condition], *, is_complete: bool = True) -> ConditionReport:
    """A verdict of them."""
    return ConditionReport(sorted(conditions, key=lambda one: (-one.severity, one.name)), is_complete)


CATALOGUE: Final[Mapping[str, ConditionKind]] = {
    "unreachable": ConditionKind(
        "The broker's database does not answer: on the two-phase path publishing fails.",
        "Check that its PostgreSQL runs, and the connection in DATABASES.",
    ),
    "schema_version": ConditionKind(
        "The broker's tables and this code do not fit together.",
        "Run `manage.py migrate --database=ALIAS` with the broker's alias, or upgrade the package; the evidence says.",
    ),
    "no_sequencer": ConditionKind(
        "No process sequences: what is published is stored, but reaches nobody.",
        "Start a worker: `celery -A app worker --outbox` or `manage.py outbox_worker`.",
    ),
    "process_failing": ConditionKind(
        "A process runs, but its work on the broker's database fails again and again: messages wait, or are refused.",
        "Mend what the error names (a missing right, a changed table, a timeout of the role, a pooler), or restart "
        "the process with its older version; the process's log has the whole error, `outbox_doctor` looks at the rest.",
    ),
    "ticks_late": ConditionKind(
        "Decided or due messages wait for the sequencer longer than they should.",
        "Look at the broker process's log, at `lock_held`, and at the load of the database.",
    ),
    "summary_late": ConditionKind(
        "The leading process does not refresh the summary: lag and counts are old or cost more to read.",
        "Look at the broker process's log; a worker of an older version may be leading.",
    ),
    "check_back_late": ConditionKind(
        "Check-back or pruning of a producer group has not begun for several periods: undecided messages stay open.",
        "Start `celery worker --outbox` or `outbox_worker` in that service; its log says why a pass fails.",
    ),
    "receiver_late": ConditionKind(
        "A receiver of OUTBOX['RECEIVE'] has not been answered by its source for several periods: nothing comes in.",
        "Start `outbox_receive`, or bring back what its log names; `outbox_receive --forget NAME` if it is gone.",
    ),
    "unanswered": ConditionKind(
        "Half messages are undecided and nobody of their producer group answers.",
        "Start the producer service with check-back; if the group is gone for good, settle them with `outbox_decide`.",
    ),
    "parked": ConditionKind(
        "Transactions are undecided past the limits of check-back. On FIFO topics they hold up their keys.",
        "`outbox_trace ID` shows every answer; `outbox_decide ID commit|rollback` settles it, asking the ledger first.",
    ),
    "contradicted": ConditionKind(
        "Somebody reported the other outcome of a decided transaction; the first decision stands.",
        "Compare the business row with `outbox_trace ID`; look for a producer group that two services share.",
    ),
    "refused": ConditionKind(
        "Ends were reported for transactions that are unknown or another group's.",
        "Look for two services with one PRODUCER_GROUP, or for a restored broker database.",
    ),
    "wrong_ledger": ConditionKind(
        "A checker cannot use the ledger that a half message names: emptied, pruned past it, or another service's.",
        "Point the alias to the right database; if that ledger is gone, settle them with `outbox_decide --force`.",
    ),
    "checker_disagrees": ConditionKind(
        "A look-up given as check= contradicts the ledger, which decided.",
        "Mend the look-up; compare the business row with `outbox_trace ID`.",
    ),
    "no_worker": ConditionKind(
        "No consumer runs for a group that subscribes to these topics.",
        "Start a worker of that service (CONSUMER_PROCESSES above 0).",
    ),
    "lag": ConditionKind(
        "A group is behind: messages wait too long, or too many.",
        "`outbox_group offsets GROUP` shows where; add consumers, or mend the slow or blocked handler.",
    ),
    "blocked_queue": ConditionKind(
        "An ordered handler keeps failing on one message; the queue behind it waits.",
        "Mend the handler, let its on_error policy skip or dead-letter the error, or move the queue past it.",
    ),
    "stopped_queue": ConditionKind(
        "A handler's on_error policy stopped its queue.",
        "Mend the cause, then `outbox_group resume GROUP`.",
    ),
    "group_paused": ConditionKind(
        "A group is paused and messages wait for it.",
        "`outbox_group resume GROUP` when the reason is over.",
    ),
    "crash_loop": ConditionKind(
        "A process of a worker has died three times or more within ten minutes.",
        "Look at its log, `suspects` and new dead letters; the evidence says how it died (signal 9: often no memory).",
    ),
    "suspects": ConditionKind(
        "Messages were being handled when their process died; they are tried alone, the third death ends it.",
        "`outbox_trace ID` shows the message; mend the handler before it is a dead letter, or replay it then.",
    ),
    "hung_handlers": ConditionKind(
        "Handlers run past their time and do not return.",
        "Find what they wait for (a lock, a call without a timeout), and give that a timeout.",
    ),
    "outage": ConditionKind(
        "A subscription pauses: its handlers fail one after the other with the same error, as if something were away.",
        "Bring back what the error names; the group goes on by itself.",
    ),
    "dead_letters": ConditionKind(
        "Groups gave up messages lately.",
        "`outbox_dead_letter list GROUP` shows the errors; mend the handler, then replay.",
    ),
    "saga_stalled": ConditionKind(
        "Sagas stand still: the message of their step, or of a deadline that has passed, will not come.",
        "Replay what is a dead letter: `outbox_dead_letter list GROUP`; lost messages are published again in a minute.",
    ),
    "task_stranded": ConditionKind(
        "Django tasks are READY, but the broker has no message left that would run them.",
        "The role `check` publishes their messages again within a minute; delete the entry of one that must not run.",
    ),
    "retry_storm": ConditionKind(
        "A group sends back most of what it handles.",
        "Something that its handler needs is down: look at the errors, or pause the group until it is back.",
    ),
    "retention_behind": ConditionKind(
        "Consumed messages past their retention time are still stored.",
        "Look at the broker process's log, and at `transaction_open` and `lock_held`: its deletes may fail or wait.",
    ),
    "pruning_behind": ConditionKind(
        "A service does not remove the rows of its ledger or inbox in time: the table grows.",
        "Look at the log of that service's worker, at `check_back_late`, and for transactions that are open for long.",
    ),
    "expired": ConditionKind(
        "Retention removed messages that a group had not consumed.",
        "Find out why the group was away; `outbox_reconcile` says what it missed.",
    ),
    "transaction_open": ConditionKind(
        "A session's transaction has been open for long: vacuum cannot remove what it might still see.",
        "End it: `SELECT pg_terminate_backend(PID)`, or COMMIT or ROLLBACK PREPARED what is prepared.",
    ),
    "lock_held": ConditionKind(
        "A session holds a lock that the broker's sessions wait for.",
        "End the blocking session or its transaction: `SELECT pg_terminate_backend(PID)`.",
    ),
    "open_since_resync": ConditionKind(
        "A publishing transaction is open since before the last resynchronisation; only its own messages wait for it.",
        "If it is forgotten, end it; what it published is delivered once it commits.",
    ),
    "space": ConditionKind(
        "The broker's tables are larger than they should be.",
        "Look at `retention_behind`, `lag` and `transaction_open`; shorten retention_seconds, or raise the limit.",
    ),
    "xid_age": ConditionKind(
        "The database approaches the wrap-around of transaction ids: PostgreSQL will refuse writes.",
        "End old transactions (`transaction_open`), drop unused slots, then VACUUM FREEZE.",
    ),
    "sequence_age": ConditionKind(
        "An identity column approaches the end of its type.",
        "Plan a new broker schema; `outbox_doctor` names the column.",
    ),
    "replica_lag": ConditionKind(
        "A replica is behind, or WAL is kept for one that is away: the disk fills, and a failover would lose commits.",
        "Look at the replica; drop the slot of one that is gone: `SELECT pg_drop_replication_slot(NAME)`.",
    ),
    "path_flipped": ConditionKind(
        "A process found the broker elsewhere than it had proven: its publishing fails until both lead to one place.",
        "Finish the failover; restart the process if the broker moved for good.",
    ),
    "not_conserved": ConditionKind(
        "The last audit found messages lost or doubled: an equation does not hold.",
        "`outbox_audit` again to confirm, `outbox_trace` for the newest ones, `outbox_reconcile` for all.",
    ),
    "lost_messages": ConditionKind(
        "Transactions that the application has committed are unknown to the broker: a restore or a failover lost their "
        "messages.",
        "Reconcile that span: `outbox-reconcile plan` and `outbox_repair` publish again from the business rows; then "
        "`outbox_compare --settle`.",
    ),
    "lost_commits": ConditionKind(
        "Messages were delivered about transactions that the application's database does not hold: it was restored.",
        "Restore a newer copy if there is one; else `outbox_reconcile` names the messages without a row. Then "
        "`outbox_compare --settle`.",
    ),
    "lost_effects": ConditionKind(
        "Groups have passed messages whose effects are gone: the database of their handlers was restored.",
        "Run the `outbox_group reset` of the evidence: it delivers them again, and the inbox skips what it knows.",
    ),
    "rejecting": ConditionKind(
        "New transactional messages are refused, by an operator's switch.",
        "`outbox_reject off` when the reason is over.",
    ),
}
