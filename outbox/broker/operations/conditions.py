"""Conditions describe the state of outbox.

Status, probe, doctor, checks, metrics, alerts and operator page show the conditions. The rules (`rules.py`) yield the
conditions of the catalogue below. The doctor, `manage.py check` and the probe of a worker also find other problems, and
report each problem as a condition. Such a condition is not in the catalogue, so it contains its own meaning and next
step.

See decision 091. docs/operations/incidents.md has the first command for each condition.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

# A condition lists at most this many facts; `count` has the number of all facts.
EVIDENCE: Final = 20

Fact = Mapping[str, str | int | float | None]
Judged = tuple["Severity | None", Fact]


class Severity(enum.IntEnum):
    """The severity of a condition; also the exit code of the status command and the value of the metric."""

    OK = 0
    """The doctor has checked the subject of the condition, and has found no fault."""
    WARNING = 1
    """An operator should look at the condition, but outbox still meets all its guarantees."""
    CRITICAL = 2
    """Messages wait, or outbox may soon break one of its guarantees."""


@dataclass(frozen=True, slots=True)
class ConditionKind:
    """The meaning of a condition, and the next step for the operator."""

    meaning: str
    next_step: str


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition that holds.

    `evidence` names at most twenty groups, queues, messages or sessions; `count` is the number of all of them.

    `meaning`: one to three sentences for the operator. `next_step`: what the operator does next. If `meaning` is empty,
    `meaning` and `next_step` come from the catalogue. `is_unknown`: it could not be read whether the condition holds.
    """

    name: str
    severity: Severity
    evidence: Sequence[Fact] = ()
    count: int = 0
    meaning: str = ""
    next_step: str = ""
    is_unknown: bool = False

    def __post_init__(self) -> None:
        if not self.meaning:
            kind = CATALOGUE[self.name]
            object.__setattr__(self, "meaning", kind.meaning)
            object.__setattr__(self, "next_step", kind.next_step)

    @property
    def text(self) -> str:
        """The meaning and the first three facts, in one line."""
        facts = "; ".join(as_facts(fact) for fact in self.evidence[:3] if fact)
        more = f"; {self.count} in all" if facts and self.count > 3 else ""
        return f"{self.meaning} ({facts}{more})" if facts else self.meaning

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**dataclasses.asdict(self), "severity": self.severity.name.lower()}


@dataclass(frozen=True, slots=True)
class ConditionReport:
    """All conditions that hold, the worst first.

    `is_complete` is False if the broker did not answer. If `is_complete` is False, conditions that are not listed may
    hold, too.
    """

    conditions: Sequence[Condition]
    is_complete: bool = True

    @property
    def severity(self) -> Severity:
        """The worst severity of all conditions."""
        return max((condition.severity for condition in self.conditions), default=Severity.OK)

    @property
    def is_healthy(self) -> bool:
        """Whether no condition holds and the report is complete."""
        return self.is_complete and not self.severity

    @property
    def problems(self) -> list[str]:
        """The conditions in words, for a probe."""
        return [one.text for one in self.conditions if one.severity]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "severity": self.severity.name.lower(),
            "complete": self.is_complete,
            "conditions": [condition.as_json() for condition in self.conditions],
        }


def condition(name: str, judged: Iterable[Judged]) -> list[Condition]:
    """Return a list with one condition, or an empty list if no fact has a severity.

    The evidence of the condition contains the facts that have a severity; the worst fact comes first.
    """
    bad = [(severity, fact) for severity, fact in judged if severity]
    if not bad:
        return []
    bad.sort(key=lambda one: -one[0])
    return [Condition(name, bad[0][0], [fact for _, fact in bad[:EVIDENCE]], len(bad))]


def of_text(name: str, severity: Severity, meaning: str, next_step: str = "") -> Condition:
    """Return a condition that is not in the catalogue, with its own texts.

    A condition with severity OK needs no next step.
    """
    return Condition(name, severity, meaning=meaning, next_step=next_step)


def unknown(name: str, error: Exception) -> Condition:
    """Return a warning that it is unknown whether the condition `name` holds, because of this error."""
    meaning = "It is unknown whether this condition holds, because its tables could not be read."
    step = "Correct the error; the next look reads the tables again."
    facts: list[Fact] = [{"error": str(error).strip()}]
    return Condition(name, Severity.WARNING, facts, 1, meaning=meaning, next_step=step, is_unknown=True)


def worst_first(conditions: Iterable[Condition], *, is_complete: bool = True) -> ConditionReport:
    """Return the report of these conditions, the worst first."""
    return ConditionReport(sorted(conditions, key=lambda one: (-one.severity, one.name)), is_complete)


def duration(seconds: float | None) -> str:
    """Return a readable time span; '' for None."""
    if seconds is None:
        return ""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def as_facts(fact: Fact) -> str:
    """Return one fact of the evidence in one line, with readable time spans."""
    return ", ".join(f"{name.removesuffix('_seconds')} {_readable(name, value)}" for name, value in fact.items())


def _readable(name: str, value: object) -> object:
    if name.endswith("seconds") and isinstance(value, (int, float)):
        return duration(value)
    return "-" if value in (None, "") else value


CATALOGUE: Final[Mapping[str, ConditionKind]] = {
    "unreachable": ConditionKind(
        "The broker's database does not answer. On the two-phase path, publishing fails.",
        "Check that the broker's PostgreSQL server runs. Check the connection in DATABASES.",
    ),
    "connections_refused": ConditionKind(
        "The database server refuses connections, because a limit on their number is reached. Messages wait, and web "
        "processes may fail.",
        "Let processes open fewer sessions (fewer workers, OUTBOX['HANDLER_THREADS'], a pool for web processes), or "
        "raise the limit. `manage.py outbox_doctor` adds up the sessions.",
    ),
    "schema_version": ConditionKind(
        "The version of the broker's tables does not fit the version of this code.",
        "The evidence says whether to upgrade the tables or the code. For the tables, run `manage.py migrate "
        "--database=ALIAS` with the broker's alias. For the code, upgrade the package.",
    ),
    "no_sequencer": ConditionKind(
        "No process runs the sequencer. The broker stores published messages, but no consumer gets them.",
        "Start a worker: `celery -A app worker --outbox` or `manage.py outbox_worker`.",
    ),
    "process_failing": ConditionKind(
        "A process runs, but its work on the broker's database fails repeatedly, so messages wait or are refused.",
        "Fix the cause that the error names (a missing right, a changed table, a timeout of the role, a pooler), or "
        "restart the process with the older version of its code. The log of the process has the whole error. "
        "`outbox_doctor` looks for other problems.",
    ),
    "ticks_late": ConditionKind(
        "Decided or due messages wait for the sequencer longer than the threshold.",
        "Check the log of the broker process, the condition `lock_held`, and the load of the database.",
    ),
    "summary_late": ConditionKind(
        "The leader does not refresh the summary. The lag and the counts are old, or reading them takes longer.",
        "Check the log of the broker process. The leader may be a worker of an older version.",
    ),
    "check_back_late": ConditionKind(
        "Check-back or pruning of a producer group has not started for several periods. Undecided messages stay "
        "undecided.",
        "Start `celery worker --outbox` or `outbox_worker` in the service of that producer group. The log of this "
        "service's worker says why a pass of check-back or pruning fails.",
    ),
    "receiver_late": ConditionKind(
        "A receiver of OUTBOX['RECEIVE'] has had no answer from its source for several periods. outbox receives no "
        "messages from this source.",
        "Start `outbox_worker --role receive`, or restore the server that the receiver's log names. If the "
        "receiver is gone for good, run `outbox_worker --forget NAME`.",
    ),
    "schedule_late": ConditionKind(
        "The leader has not published the message of a schedule in time.",
        "If the evidence has an error, correct the declaration of the schedule or declare its topic. If there is no "
        "error, check the conditions `no_sequencer` and `process_failing`, and the log of the broker process.",
    ),
    "unanswered": ConditionKind(
        "Half messages are undecided, and no process of their producer group answers.",
        "Start the producer service with check-back. If the producer group is gone for good, decide its half "
        "messages with `outbox_transaction decide`.",
    ),
    "parked": ConditionKind(
        "Transactions are still undecided past the limits of check-back. On FIFO topics these transactions block "
        "their keys.",
        "`outbox_message show ID` shows the answers of all checks. `outbox_transaction decide ID commit` or "
        "`outbox_transaction decide ID rollback` asks the ledger, then decides.",
    ),
    "contradicted": ConditionKind(
        "A process reported the opposite outcome of a decided transaction. The first decision stays valid.",
        "Compare the business row with the output of `outbox_message show ID`. Check whether two services share "
        "one producer group. Then run `outbox_audit settle --condition contradicted`.",
    ),
    "refused": ConditionKind(
        "A process reported COMMIT or ROLLBACK of a transaction that is unknown or belongs to another producer group.",
        "Check whether two services have the same PRODUCER_GROUP, or whether the broker's database was restored. "
        "Then run `outbox_audit settle --condition refused`.",
    ),
    "wrong_ledger": ConditionKind(
        "Check-back cannot use the ledger that a half message names. The ledger was emptied, its rows from the "
        "time of the message were pruned, or it belongs to another service.",
        "Point the database alias to the right database. If the ledger is gone, decide the transactions with "
        "`outbox_transaction decide --force`.",
    ),
    "checker_disagrees": ConditionKind(
        "A look-up function given as check= contradicts the ledger. outbox used the ledger's answer.",
        "Fix the look-up function. Compare the business row with the output of `outbox_message show ID`. Then run "
        "`outbox_audit settle --condition checker_disagrees`.",
    ),
    "no_worker": ConditionKind(
        "A group subscribes to topics, but no consumer of the group runs.",
        "Start a worker of the group's service with CONSUMER_PROCESSES above 0.",
    ),
    "lag": ConditionKind(
        "A group is behind: its messages wait too long, or too many messages wait.",
        "If the evidence names a limit, the group waits for its own limit: raise it with `outbox_group limits` if the "
        "service behind the handler allows it. Otherwise add consumers, or fix the slow or blocked handler: "
        "`outbox_group offsets GROUP` shows which queues are behind.",
    ),
    "blocked_queue": ConditionKind(
        "An ordered handler fails on one message again and again, and the messages behind this message wait.",
        "Fix the handler, let its on_error policy retry the message later or make it a dead letter, or skip the "
        "message with `outbox_group skip GROUP TOPIC MESSAGE`.",
    ),
    "stopped_queue": ConditionKind(
        "The on_error policy of a handler stopped its queue.",
        "Fix the cause of the handler's error, then run `outbox_group resume GROUP`.",
    ),
    "group_paused": ConditionKind(
        "A group is paused, and messages wait for it.",
        "When the reason for the pause is gone, run `outbox_group resume GROUP`.",
    ),
    "crash_loop": ConditionKind(
        "A process of a worker has died three times or more within ten minutes.",
        "Check the log of the process, the condition `quarantined` and new dead letters. The evidence says how the "
        "process died (signal 9 often means out of memory). The condition ends when fewer than three deaths are in the "
        "last ten minutes.",
    ),
    "quarantined": ConditionKind(
        "A process died while it handled these messages. Consumers now handle each of these messages alone. After "
        "the third death the message becomes a dead letter.",
        "`outbox_message show ID` shows the message. Fix the handler before the message becomes a dead letter, or "
        "replay it afterwards.",
    ),
    "hung_handlers": ConditionKind(
        "Handlers run past their timeout and do not return.",
        "Find the lock or the call for which the handlers wait without a timeout, and give this lock or call a "
        "timeout.",
    ),
    "claim_held_long": ConditionKind(
        'Handlers with effects="outside" have run for long, and still hold the claims of their messages.',
        "`outbox_message show ID` shows the steps that are done. Find the call of another system for which the handler "
        "waits, and give this call a timeout.",
    ),
    "outage": ConditionKind(
        "A subscription pauses, because its handlers fail one after another with the same error. Probably a "
        "service that the handlers need is down.",
        "Restore the service that the error names: the group then resumes by itself. A disabled endpoint must also be "
        "enabled.",
    ),
    "unknown_version": ConditionKind(
        "Messages of an event wait, because newer code has published them and the workers do not know their version.",
        "Deploy the workers with the code that declares this version. The messages then continue by themselves.",
    ),
    "endpoint_disabled": ConditionKind(
        "An endpoint of FORWARD says that it exists no more, so it gets no messages. Its messages wait.",
        "If the endpoint exists again, run `outbox_endpoint enable GROUP`. If it is gone for good, remove its entry "
        "from FORWARD, then run `outbox_group delete GROUP`.",
    ),
    "reconciliation_findings": ConditionKind(
        "The last saved reconciliation has open findings: rows, messages and effects that do not agree.",
        "The page Findings, or `outbox_finding list`, shows each finding with its next step. Repair the findings, then "
        "run the reconciliation again: the condition ends with the next saved result.",
    ),
    "limit_binding": ConditionKind(
        "Messages of a subscription have waited for one of its limits for long.",
        "If the service behind the handler allows it, raise the limit with `outbox_group limits`.",
    ),
    "dead_letters": ConditionKind(
        "Messages of these groups have recently become dead letters.",
        "`outbox_dead_letter list GROUP` shows the errors. Fix the handler, then replay the dead letters.",
    ),
    "saga_stalled": ConditionKind(
        "Sagas make no progress, because the message of their step, or of a deadline that has passed, will not arrive.",
        "Replay the dead letters of the stalled sagas: `outbox_dead_letter list GROUP`. The role `check` "
        "publishes lost messages again within a minute.",
    ),
    "task_stranded": ConditionKind(
        "Django tasks are READY, but the broker has no message left that would run them.",
        "The role `check` publishes the messages of stranded tasks again within a minute. If a task must not run, "
        "delete the row of the task in the table of tasks.",
    ),
    "retry_storm": ConditionKind(
        "A group sends most of its messages back for another attempt.",
        "Probably a service that the group's handler needs is down. Check the errors, or pause the group until the "
        "service is back.",
    ),
    "topic_near_limit": ConditionKind(
        "A topic uses more than 80 % of its limit of backlog or space. Over the limit, publishing to the topic is "
        "refused, or logs warnings (`on_limit`).",
        "Start or speed up the workers of the group that is behind, or raise the limit with `outbox_topic alter`.",
    ),
    "topic_over_limit": ConditionKind(
        "A limit of a topic is exceeded. With `on_limit` = refuse, publishing to the topic raises TopicOverLimit.",
        "Start or speed up the workers of the group that is behind. If the group is gone for good, delete it. To "
        "accept messages now, raise the limit with `outbox_topic alter`.",
    ),
    "retention_behind": ConditionKind(
        "The broker still stores consumed messages that are past their retention time.",
        "Check the log of the broker process and the conditions `transaction_open` and `lock_held`. The deletes "
        "of retention may fail or wait.",
    ),
    "pruning_behind": ConditionKind(
        "A service does not remove old rows of its ledger or inbox in time, so the table grows.",
        "Check the log of the service's worker and the condition `check_back_late`. Look for transactions that are "
        "open for long.",
    ),
    "expired": ConditionKind(
        "Retention removed messages that a group had not consumed.",
        "Find out why the group did not consume the removed messages. `outbox_reconcile` lists the messages that "
        "the group missed. Then run `outbox_audit settle --condition expired`.",
    ),
    "transaction_open": ConditionKind(
        "A session's transaction has been open for long. Vacuum cannot remove rows that this transaction might still "
        "see.",
        "The evidence names the application of the session. If it is a backup (pg_dump), let it end. Otherwise end the "
        "session: `SELECT pg_terminate_backend(PID)`. End a prepared transaction with COMMIT PREPARED or ROLLBACK "
        "PREPARED.",
    ),
    "lock_held": ConditionKind(
        "A session holds a lock that the broker's sessions wait for.",
        "End the blocking transaction, or its session: `SELECT pg_terminate_backend(PID)`.",
    ),
    "open_since_resync": ConditionKind(
        "A publishing transaction has been open since before the last resynchronisation. Only the messages of this "
        "transaction wait until this transaction ends.",
        "If no program needs the transaction any more, end the transaction. If the transaction commits, the broker "
        "delivers its messages.",
    ),
    "space": ConditionKind(
        "The broker's tables are larger than the threshold SPACE_BYTES.",
        "Check `retention_behind`, `lag` and `transaction_open`. Shorten retention_seconds, or raise the threshold.",
    ),
    "xid_age": ConditionKind(
        "The database approaches the wrap-around of transaction ids. PostgreSQL will refuse writes.",
        "End old transactions (`transaction_open`), drop unused replication slots, then run VACUUM FREEZE.",
    ),
    "sequence_age": ConditionKind(
        "An identity column approaches the largest value of its type.",
        "Plan a new schema for the broker. `outbox_doctor` names the column.",
    ),
    "replica_lag": ConditionKind(
        "A replica is behind its primary, or the server keeps WAL for a replica that is gone. The disk fills, and "
        "a failover would lose commits.",
        "Check the replica. If the replica is gone, drop its replication slot: `SELECT "
        "pg_drop_replication_slot(NAME)`.",
    ),
    "path_flipped": ConditionKind(
        "A database connection of a process no longer reaches the broker's database. Publishing through this "
        "connection fails until the connection and the broker's alias lead to the same primary.",
        "Finish the failover. If the broker moved for good, restart the process. Then run `outbox_audit settle "
        "--condition path_flipped`.",
    ),
    "not_conserved": ConditionKind(
        "The last audit found lost or duplicated messages, because an equation of the audit does not hold.",
        "Run `outbox_audit` again to confirm the result. To examine the newest messages, use `outbox_message show`. "
        "To examine all messages, use `outbox_reconcile`.",
    ),
    "lost_messages": ConditionKind(
        "The broker does not know transactions that the application has committed, because a restore or a "
        "failover lost their messages.",
        "Reconcile the time span of the evidence: `outbox-reconcile plan` and `outbox_repair` publish the "
        "messages again from the business rows. After the repair, run `outbox_audit settle`.",
    ),
    "lost_commits": ConditionKind(
        "The broker delivered messages of transactions that the application's database does not contain. The "
        "application's database was restored.",
        "If there is a newer copy of the database, restore this copy. If there is no newer copy, `outbox_reconcile` "
        "lists "
        "the messages without a row. Finally, run `outbox_audit settle`.",
    ),
    "lost_effects": ConditionKind(
        "Groups have passed messages whose effects are missing, because the handlers' database was restored.",
        "Run the `outbox_group reset` command of the evidence. After this reset, the broker delivers the messages "
        "again, and the inbox skips the messages that it knows.",
    ),
    "rejecting": ConditionKind(
        "An operator has set the broker to refuse new transactional messages.",
        "When the reason for the refusal is gone, run `outbox_transaction accept`.",
    ),
}


# ---------------------------------------------------------------------------------------------------------------------
# Thresholds: the value from which a condition is a warning, and the value from which it is critical.

_DAY: Final = 24 * 3600.0
_GIBIBYTE: Final = 2.0**30


@dataclass(frozen=True, slots=True)
class Threshold:
    """A value is a warning if it is at least `warning`, and critical if it is at least `critical`.

    None means "no limit".
    """

    warning: float | None
    critical: float | None

    def judge(self, value: float | None) -> Severity | None:
        """Return the severity of a value; None if the value is within the limits or unknown."""
        if value is None:
            return None
        if self.critical is not None and value >= self.critical:
            return Severity.CRITICAL
        if self.warning is not None and value >= self.warning:
            return Severity.WARNING
        return None


def _limits(warning: float, critical: float | None, unit: str, meaning: str) -> Threshold:
    """Return a field with default, unit and meaning.

    The table of thresholds in docs/operations/monitoring.md is generated from these fields.
    """
    made: Any = field(default=Threshold(warning, critical), metadata={"unit": unit, "meaning": meaning})
    return made  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """All thresholds. The name of a field ends with its unit, or with the name of the things that the field counts."""

    no_sequencer_seconds: Threshold = _limits(0, 15, "seconds", "time since a process last led the broker")
    no_worker_seconds: Threshold = _limits(
        10,
        30,
        "seconds",
        "time since the last consumer of a group left or lost its lease; a restart of a consumer takes less time",
    )
    tick_late_seconds: Threshold = _limits(10, 60, "seconds", "age of a decided or due message that is in no queue")
    pass_late_periods: Threshold = _limits(
        3, 10, "periods", "delay of a pass of check-back or pruning, measured in intervals between two passes"
    )
    schedule_late_seconds: Threshold = _limits(60, 600, "seconds", "time since a due moment of a schedule has passed")
    unanswered_seconds: Threshold = _limits(120, 900, "seconds", "time since a check became due")
    parked_messages: Threshold = _limits(1, 100, "messages", "parked messages")
    lag_seconds: Threshold = _limits(60, 600, "seconds", "age of the oldest waiting message, per group and topic")
    lag_messages: Threshold = _limits(10_000, 1_000_000, "messages", "waiting messages, per group and topic")
    limit_seconds: Threshold = _limits(
        600, None, "seconds", "time for which messages of a subscription have waited for a limit without a break"
    )
    claim_seconds: Threshold = _limits(
        600, None, "seconds", 'time for which a handler with `effects="outside"` has held the claim of its message'
    )
    dead_letters: Threshold = _limits(1, 1000, "messages", "dead letters of a group")
    retry_share: Threshold = _limits(
        0.5,
        0.9,
        "share",
        "messages sent back for another attempt, divided by all messages that the group finished in the last minute; a "
        "group that sent back fewer than 100 messages is not judged",
    )
    retention_behind_seconds: Threshold = _limits(
        3600,
        _DAY,
        "seconds",
        "time for which the oldest row of the log, a ledger or an inbox is past its retention time; only the log is "
        "ever critical",
    )
    transaction_seconds: Threshold = _limits(300, 3600, "seconds", "age of a transaction that holds back vacuum")
    lock_seconds: Threshold = _limits(5, 60, "seconds", "time for which a session of the broker waits for a lock")
    space_bytes: Threshold = _limits(50 * _GIBIBYTE, None, "bytes", "size of the broker's tables")
    xid_age: Threshold = _limits(
        1e9,
        1.8e9,
        "transactions",
        "age of the oldest row, counted in transactions; at an age of 2^31, the transaction ids wrap around",
    )
    replica_lag_bytes: Threshold = _limits(
        _GIBIBYTE / 4,
        4 * _GIBIBYTE,
        "bytes",
        "WAL that a replica has not replayed, or that is kept for a disconnected replica",
    )
