"""The conditions of the core: the broker, its transactions, groups, topics, and its PostgreSQL server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from outbox import hooks
from outbox.broker.database.arrays import texts, xids
from outbox.broker.database.executor import Executor, Row, Snapshot
from outbox.broker.database.statement import Statement
from outbox.broker.log.failing import ProcessPart, failing
from outbox.broker.log.incidents import IncidentKind
from outbox.broker.operations import audit, presence, sessions, topic_limits
from outbox.broker.operations.comparisons import ComparisonKind, DatabaseComparison, list_comparisons
from outbox.broker.operations.conditions import (
    BY_ERROR,
    EVIDENCE,
    INCIDENTS,
    OF_GROUP,
    PAUSE,
    RESUME,
    WORKERS,
    Concern,
    Counted,
    Declarations,
    DeclaredCondition,
    Fact,
    Judged,
    Place,
    Remedy,
    Severity,
    Shown,
    Symptom,
    Threshold,
    Thresholds,
    fact_of,
)
from outbox.broker.operations.liveness import leadership
from outbox.broker.operations.progress import list_blocked
from outbox.broker.operations.state import BrokerState
from outbox.broker.operations.summary import GroupProgress, growth, lags_of
from outbox.broker.transaction import turns
from outbox.utils.refused_connections import says_refused

_DAY: Final = 24 * 3600.0
_GIBIBYTE: Final = 2.0**30

CONDITIONS: Final = Declarations[BrokerState]()

# ---------------------------------------------------------------------------------------------------------------------
# The broker as a whole: does it answer, does a process lead, do processes work, is the audit clean.

CONDITIONS.add(
    DeclaredCondition(
        name="unreachable",
        meaning="The broker's database does not answer. On the two-phase path, publishing fails.",
        next_step="Check that the broker's PostgreSQL server runs. Check the connection in DATABASES.",
        concern=Concern.PUBLISHING,
        symptom=Symptom.PUBLISHING,
    )
)
CONDITIONS.add(
    DeclaredCondition(
        name="schema_version",
        meaning="The version of the broker's tables does not fit the version of this code.",
        next_step="The evidence says whether to correct the connection, or to upgrade the tables or the code. For the "
        "tables, run `manage.py migrate --database ALIAS` with the broker's alias. For the code, upgrade the package.",
        concern=Concern.PUBLISHING,
        symptom=Symptom.START,
    )
)

_OUTAGES: Final = Statement("""
SELECT consumer_group.name AS group, topic.name AS topic, count(*) AS consumers,
       date_trunc('second', min(since))::text AS since,
       max(extract(epoch FROM clock_timestamp() - since))::double precision AS lasts_seconds,
       CASE WHEN bool_or(paused) THEN 'after the group is resumed'
            ELSE date_trunc('second', greatest(min(next_call_at), clock_timestamp()))::text END AS next_call,
       (array_agg(error ORDER BY seen_at DESC))[1] AS error
FROM {schema}.outage JOIN {schema}.consumer_group USING (group_id) JOIN {schema}.topic USING (topic_id)
WHERE EXISTS (SELECT FROM {schema}.consumer
              WHERE consumer.instance_id = outage.instance_id AND expires_at > clock_timestamp())
GROUP BY 1, 2 ORDER BY min(since)
""")


def outages(run: Executor) -> list[dict[str, Any]]:
    """Return a fact for each group and topic whose subscription pauses because of an outage, the longest first."""
    return run.objects(dict, _OUTAGES)


def is_held_up(one: GroupProgress, outage: Fact) -> bool:
    """Whether these messages of a group wait for the end of an outage, in the queues of the topic or as retries."""
    return one.group == outage["group"] and (one.is_retry or one.topic == outage["topic"])


@CONDITIONS.declare(
    meaning="The database server refuses connections, because their number has reached a limit. Messages wait, and "
    "web processes may fail.",
    next_step="Let processes open fewer connections (docs/operations/connections.md#too-many-connections), or raise "
    "the limit. Workers then continue by themselves. `outbox_doctor` adds up the connections. If the server refuses "
    "it too, run it with the login of a superuser: PostgreSQL reserves connections for superusers.",
    concern=Concern.PUBLISHING,
    symptom=Symptom.PUBLISHING,
    shown=Shown(listed=WORKERS),
)
def connections_refused(state: BrokerState) -> Iterator[Judged]:
    for limit in sessions.limits(state.run):
        if limit.used >= limit.allowed:
            yield Severity.CRITICAL, {"refused": limit.limit, "open_connections": limit.used, "limit": limit.allowed}
    for part in state.once(failing):
        if says_refused(part.error):
            refused = {"refused": f"process {part.process}"}
            yield Severity.CRITICAL, {**refused, **fact_of(part, "part", "since", "error")}
    for outage in state.once(outages):
        if says_refused(outage["error"]):
            named = {name: value for name, value in outage.items() if name != "group"}
            yield Severity.CRITICAL, {"refused": f"handlers of {outage['group']}", **named}


@CONDITIONS.declare(
    meaning="A process runs, but its work on the broker's database fails repeatedly, so messages wait or are refused.",
    next_step="Fix the cause that the error names, such as a missing right (`manage.py outbox_doctor --for work` names "
    "it), a changed table, a timeout of the role, or a pooler. Or restart the process with the older version of its "
    "code. The log of the process has the whole error.",
    concern=Concern.WAITING,
    symptom=Symptom.START,
    subject=("failing",),
    shown=Shown(listed=WORKERS, figure="Workers"),
)
def process_failing(state: BrokerState) -> Iterator[Judged]:
    for one in state.once(failing):
        if not says_refused(one.error):
            part: Fact = {"failing": f"{one.part} of {one.of}" if one.of else str(one.part)}
            yield Severity.CRITICAL, {**part, **fact_of(one, "process", "since", "seen_seconds", "error")}


NO_SEQUENCER_SECONDS: Final = Threshold(
    "no_sequencer_seconds", 0, 15, "seconds", "time since a process last led the broker"
)


@CONDITIONS.declare(
    meaning="No process runs the sequencer, which puts messages into queues. Published messages are stored, but no "
    "consumer gets them.",
    next_step="Start a worker: `celery -A app worker --outbox` or `manage.py outbox_worker`.",
    concern=Concern.WAITING,
    symptom=Symptom.WAITING,
    thresholds=(NO_SEQUENCER_SECONDS,),
    shown=Shown(listed=WORKERS, figure="Sequencer"),
)
def no_sequencer(state: BrokerState) -> Iterator[Judged]:
    now = state.once(leadership)
    # If one tries and fails, `process_failing` holds: another process would not help.
    if now.leader is None and not any(one.part is ProcessPart.SEQUENCING for one in state.once(failing)):
        gone = now.gone_seconds
        severity = Severity.CRITICAL if gone is None else state.judge(NO_SEQUENCER_SECONDS, gone)
        waiting = _not_queued(state.run, now.snapshot) if severity else None
        fact: Fact = {"without_leader_seconds": gone, "last_tick_seconds": now.tick_seconds}
        yield severity, {**fact, "not_queued_messages": waiting}


@CONDITIONS.declare(
    meaning="The broker has the tables of a part of outbox (an app), but the leader does not have this app. Messages "
    "are delivered, but the leader's work for the part is not done.",
    next_step="Start a worker whose INSTALLED_APPS contains the app of this part, and the apps of all other parts on "
    "the broker. If no service needs the part any more, drop its tables (docs/operations/upgrade.md#remove-a-part).",
    concern=Concern.WAITING,
    symptom=Symptom.WAITING,
    subject=("part",),
    shown=Shown(listed=WORKERS),
)
def part_missing(state: BrokerState) -> Iterator[Judged]:
    for part in state.once(leadership).lacks:
        yield Severity.CRITICAL, {"part": part}


# The age of the oldest decision (that of the lowest transaction id) that the last tick could not see.
_UNREAD: Final = Statement("""
SELECT (extract(epoch FROM clock_timestamp()) - extract(epoch FROM min(decided_at)))::double precision
FROM (
    (SELECT decided_at FROM {schema}.op_log
     WHERE xid >= %(xmax)s::xid8 AND xid < pg_snapshot_xmax(pg_current_snapshot()) ORDER BY xid LIMIT 1)
    UNION ALL
    (SELECT decided_at FROM {schema}.op_log WHERE xid = ANY (%(xip)s::xid8[]))
) AS unread
""")
_MOST_COUNTED: Final = 10_000
# The committed messages that the last tick could not see, counted up to a limit, because they are in no queue and so in
# no lag.
_NOT_QUEUED: Final = Statement("""
SELECT coalesce(sum(cardinality(log_ids)), 0)::bigint
FROM (
    (SELECT log_ids, decision FROM {schema}.op_log
     WHERE xid >= %(xmax)s::xid8 AND xid < pg_snapshot_xmax(pg_current_snapshot()) ORDER BY xid LIMIT %(most)s)
    UNION ALL
    (SELECT log_ids, decision FROM {schema}.op_log WHERE xid = ANY (%(xip)s::xid8[]) LIMIT %(most)s)
) AS unread
WHERE decision = 'C'
""")


def _not_queued(run: Executor, snapshot: str) -> int | str:
    """Return how many committed messages are not in the `snapshot` of the last tick, such as 8 or "10000 or more"."""
    seen = Snapshot.parse(snapshot)
    given = {"xmax": str(seen.xmax), "xip": xids(seen.in_progress), "most": _MOST_COUNTED}
    [count] = run.one(_NOT_QUEUED, given, prepare=False)
    return f"{count} or more" if count >= _MOST_COUNTED else int(count)


TICK_LATE_SECONDS: Final = Threshold(
    "tick_late_seconds",
    10,
    60,
    "seconds",
    "time for which a committed, rolled back or due message has waited for the sequencer",
)


@CONDITIONS.declare(
    meaning="Messages that are committed, rolled back or due have waited too long for the sequencer.",
    next_step="Check the log of the broker process, the condition `lock_held`, and the load of the database.",
    concern=Concern.WAITING,
    symptom=Symptom.WAITING,
    thresholds=(TICK_LATE_SECONDS,),
    shown=Shown(listed=WORKERS, figure="Sequencer"),
)
def ticks_late(state: BrokerState) -> Iterator[Judged]:
    now = state.once(leadership)
    if now.leader is not None:
        severity, fact = oldest_undelivered(state.run, state.thresholds, now.snapshot)
        if severity:
            fact = {**fact, "not_queued_messages": _not_queued(state.run, now.snapshot)}
        yield severity, fact
        yield state.judge(TICK_LATE_SECONDS, now.overdue_seconds), {"waiting": "due", "seconds": now.overdue_seconds}


def oldest_undelivered(run: Executor, thresholds: Thresholds, snapshot: str) -> Judged:
    """Return the waiting time of the oldest decision that is not in the `snapshot` of the last tick."""
    seen = Snapshot.parse(snapshot)
    # The statement is not prepared, because a plan made without the values of the snapshot would read the whole table.
    [seconds] = run.one(_UNREAD, {"xmax": str(seen.xmax), "xip": xids(seen.in_progress)}, prepare=False)
    return TICK_LATE_SECONDS.judge(seconds, thresholds), {"waiting": "decided", "seconds": seconds}


@CONDITIONS.declare(
    meaning="The leader does not count in time, so the lag and other figures are old, or reading them takes longer.",
    next_step="Check the log of the broker process. If the leader is a worker of an older version, upgrade it.",
    concern=Concern.PASSING,
    symptom=Symptom.WAITING,
    shown=Shown(listed=WORKERS),
)
def summary_late(state: BrokerState) -> Iterator[Judged]:
    leader, age_seconds = state.once(leadership).leader, state.summary.stored_age_seconds
    if leader is not None and state.summary.is_late and age_seconds is not None:
        yield Severity.WARNING, {"age_seconds": age_seconds}


_PASSES: Final = Statement("""
SELECT name AS pass, producer_group,
       extract(epoch FROM clock_timestamp() - began_at)::double precision AS last_run_seconds,
       interval_seconds AS period_seconds
FROM {schema}.periodic_pass ORDER BY began_at
""")
PASS_LATE_PERIODS: Final = Threshold(
    "pass_late_periods", 3, 10, "periods", "delay of check-back, pruning or a receiver, as a multiple of its interval"
)


def late_passes(state: BrokerState) -> Iterator[Judged]:
    """Return all periodic passes but those that fail; those that have not started for long have a severity."""
    notes = [one for one in state.once(failing) if one.part in (ProcessPart.PASS, ProcessPart.TASK)]
    for fact in state.facts(_PASSES):
        if not any(one.works_for(fact["pass"]) and one.works_for(fact["producer_group"]) for one in notes):
            periods = fact["last_run_seconds"] / max(fact["period_seconds"], 1.0)
            yield state.judge(PASS_LATE_PERIODS, periods), fact


@CONDITIONS.declare(
    meaning="Check-back or pruning of a producer group has not started for several periods, so messages stay "
    "undecided, or tables grow.",
    next_step="Start `celery worker --outbox` or `outbox_worker` in the service that has this PRODUCER_GROUP. If one "
    "runs, its log says why check-back or pruning fails. If no service has this name any more, run `outbox_transaction "
    "forget GROUP`.",
    concern=Concern.UNDECIDED,
    symptom=Symptom.UNDECIDED,
    thresholds=(PASS_LATE_PERIODS,),
    subject=("pass",),
    shown=Shown(listed=Place("undecided", "Undecided transactions"), figure="Undecided"),
)
def check_back_late(state: BrokerState) -> Iterable[Judged]:
    return [one for one in late_passes(state) if turns.OF_PART not in str(one[1]["pass"])]


@CONDITIONS.declare(
    meaning="In the last audit, the counts of messages did not add up: messages may be lost or duplicated.",
    next_step="Run `outbox_audit` again to confirm the result. `outbox_message show ID` examines one of the newest "
    "messages, and a reconciliation examines all messages (docs/reconciliation/index.md).",
    concern=Concern.LOSS,
    symptom=Symptom.MISSING,
)
def not_conserved(state: BrokerState) -> Iterator[Judged]:
    if (last := audit.last(state.run)) is not None:
        for text in last.differences:
            yield Severity.CRITICAL, {"difference": text, "audited_at": last.at}


@CONDITIONS.declare(
    meaning="An operator has switched off the publishing of transactional messages.",
    next_step="To switch publishing on again, run `outbox_transaction accept`.",
    concern=Concern.ON_PURPOSE,
    symptom=Symptom.PUBLISHING,
    shown=Shown(listed=None, remedies=(Remedy("accept", "Accept messages again …", "good"),)),
)
def rejecting(state: BrokerState) -> Iterator[Judged]:
    if state.once(leadership).is_rejecting:
        yield Severity.WARNING, {}


# ---------------------------------------------------------------------------------------------------------------------
# Incidents: such a condition holds for a day, or until an operator settles it.

# The time for which an event (an incident, a new dead letter) is shown, unless an operator settles it before.
_EVENT_SECONDS: Final = _DAY
# The conditions that an operator settles. `wrong_ledger` ends when its transaction is decided.
SETTLED_BY_OPERATORS: Final = {
    "contradicted": IncidentKind.CONTRADICTED,
    "refused": IncidentKind.REFUSED,
    "expired": IncidentKind.EXPIRED,
    "path_flipped": IncidentKind.PATH,
}
# Whether an incident is about a ledger that an undecided transaction needs.
_IS_OPEN: Final = """
kind = 'wrong_ledger' AND NOT EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id::text = subject)
    AND EXISTS (SELECT FROM {schema}.pending_check WHERE pending_check.transaction_id::text = subject)
"""
# The newest thousand incidents of each kind, so that many incidents of one kind do not hide another kind. The inner
# statement sorts only ids, because sorting whole rows would take longer.
_INCIDENTS: Final = Statement(f"""
SELECT kind, open, sum(incidents)::bigint AS incidents, count(*) AS subjects,
       (array_agg(json_build_object('subject', subject, 'newest', newest::text, 'detail', detail)
                  ORDER BY newest_id DESC))[1:3] AS facts
FROM (
    SELECT kind, {_IS_OPEN} AS open, subject, count(*) AS incidents, max(incident_id) AS newest_id, max(at) AS newest,
           (array_agg(detail ORDER BY incident_id DESC))[1] AS detail
    FROM (SELECT incident_id, row_number() OVER (PARTITION BY kind ORDER BY at DESC) AS place
          FROM {{schema}}.incident WHERE at > clock_timestamp() - make_interval(secs => %(window)s)) AS recent
    JOIN {{schema}}.incident USING (incident_id)
    WHERE place <= 1000
    GROUP BY kind, subject
) AS judged
GROUP BY kind, open
""")
# The statement changes only rows that it sees, so an incident whose transaction commits later is shown.
_SETTLE: Final = Statement("""
UPDATE {schema}.incident SET kind = %(settled)s, detail = kind || ': ' || detail
WHERE kind = ANY (%(kinds)s::text[]) AND at > clock_timestamp() - make_interval(secs => %(window)s)
""")


def _incidents(run: Executor) -> dict[tuple[str, bool], Row]:
    """Return the recent incidents by kind, and by whether an undecided transaction needs their ledger.

    `incidents`: their number. They are about so many `subjects`, and `facts` are about the newest ones.
    """
    found = run.objects(Row, _INCIDENTS, {"window": _EVENT_SECONDS})
    return {(one.kind, one.open): one for one in found}


def _of_incidents(
    state: BrokerState, kind: IncidentKind, severity: Severity = Severity.CRITICAL, *, is_open: bool = False
) -> Counted:
    found = state.once(_incidents).get((kind, is_open))
    return Counted([(severity, fact) for fact in found.facts], found.subjects) if found else Counted([], 0)


def incidents_to_settle(run: Executor) -> dict[str, int]:
    """Return the conditions of incidents that hold now, each with its number of incidents."""
    found = _incidents(run)
    return {name: found[kind, False].incidents for name, kind in SETTLED_BY_OPERATORS.items() if (kind, False) in found}


def settle_incidents(run: Executor, names: Iterable[str]) -> int:
    """Settle the incidents of these conditions, so that the conditions end. Return the number of incidents."""
    kinds = texts([SETTLED_BY_OPERATORS[name] for name in names])
    return run.count(_SETTLE, {"kinds": kinds, "window": _EVENT_SECONDS, "settled": str(IncidentKind.SETTLED)})


@CONDITIONS.declare(
    meaning="After a transaction was decided, a process reported the opposite outcome. The first decision stays valid.",
    next_step="Compare the row in your own table with the output of `outbox_message show ID`. Check whether two "
    "services share one producer group, or whether the broker was restored. Then run `outbox_audit settle --condition "
    "contradicted` (docs/operations/monitoring.md#when-a-condition-ends).",
    concern=Concern.LOSS,
    symptom=Symptom.UNDECIDED,
    subject=("subject",),
    shown=Shown(listed=INCIDENTS),
)
def contradicted(state: BrokerState) -> Counted:
    return _of_incidents(state, IncidentKind.CONTRADICTED)


@CONDITIONS.declare(
    meaning="A process reported the outcome of a transaction that the broker does not know, or that belongs to "
    "another producer group.",
    next_step="Check whether two services have the same PRODUCER_GROUP, and whether the broker's database was "
    "restored. Then run `outbox_audit settle --condition refused`.",
    concern=Concern.WITHIN_DAYS,
    symptom=Symptom.UNDECIDED,
    subject=("subject",),
    shown=Shown(listed=INCIDENTS),
)
def refused(state: BrokerState) -> Counted:
    return _of_incidents(state, IncidentKind.REFUSED, Severity.WARNING)


@CONDITIONS.declare(
    meaning="Check-back cannot use the ledger that a half message names: the ledger was emptied, belongs to another "
    "service, or no longer has the rows of that time.",
    next_step="Point the database alias to the right database. If the ledger or its rows are gone, look for the "
    "row of the transaction in your own table. If it exists, run `outbox_transaction decide ID commit --force`; if "
    "not, `outbox_transaction decide ID rollback --force`.",
    concern=Concern.UNDECIDED,
    symptom=Symptom.UNDECIDED,
    subject=("subject",),
    shown=Shown(listed=INCIDENTS, figure="Undecided"),
)
def wrong_ledger(state: BrokerState) -> Counted:
    return _of_incidents(state, IncidentKind.WRONG_LEDGER, is_open=True)


@CONDITIONS.declare(
    meaning="Old messages were removed before a group had consumed them.",
    next_step="Find out why the group did not consume the messages. A reconciliation lists them "
    "(docs/reconciliation/index.md). Then run `outbox_audit settle --condition expired`.",
    concern=Concern.LOSS,
    symptom=Symptom.DISK,
    subject=("subject",),
    shown=Shown(listed=INCIDENTS),
)
def expired(state: BrokerState) -> Counted:
    return _of_incidents(state, IncidentKind.EXPIRED)


@CONDITIONS.declare(
    meaning="A database connection of a process no longer reaches the broker's database, so publishing through this "
    "connection fails.",
    next_step="If a failover has begun, finish it (docs/operations/restore.md#fail-over). If the broker moved for "
    "good, restart the process. Then run `outbox_audit settle --condition path_flipped`.",
    concern=Concern.PUBLISHING,
    symptom=Symptom.PUBLISHING,
    subject=("subject",),
    shown=Shown(listed=INCIDENTS),
)
def path_flipped(state: BrokerState) -> Counted:
    return _of_incidents(state, IncidentKind.PATH)


# ---------------------------------------------------------------------------------------------------------------------
# Data lost by a restore or a failover, from the last comparison with the application's databases.


def _lost(state: BrokerState, kind: ComparisonKind) -> Counted:
    found = [one for one in state.once(list_comparisons).values() if one.kind is kind and not one.is_clean]
    count = sum(max(1, one.missing) for one in found)
    return Counted([(Severity.CRITICAL, _fact(one)) for one in found], count)


def _fact(one: DatabaseComparison) -> Fact:
    of_inbox = one.kind is ComparisonKind.INBOX
    fact: dict[str, str | int | float | None] = {
        ("group" if of_inbox else "producer_group"): one.subject,
        "database": one.alias,
        "missing": one.missing,
    }
    if one.missing:
        fact |= {"first": str(one.first_at), "last": str(one.last_at), "ids": ", ".join(map(str, one.ids))}
    if one.unproven_to is not None:
        fact |= {"unknown_from": str(one.unproven_from), "unknown_to": str(one.unproven_to)}
    if of_inbox:
        assert one.first_at is not None
        # 1 ms before the first lost message, so that rounding cannot exclude this message.
        at = (one.first_at - timedelta(milliseconds=1)).isoformat()
        command = f"manage.py outbox_group reset {one.subject} {one.topic} --to-time {at}"
        fact |= {"topic": one.topic, "command": command}
    return fact


@CONDITIONS.declare(
    meaning="The application has committed transactions that the broker does not know: a restore or a failover lost "
    "their messages.",
    next_step="Run a reconciliation for the time span of the evidence, and publish the lost messages again from your "
    "own rows (docs/operations/restore.md#restore). Then run `outbox_audit settle`.",
    concern=Concern.LOSS,
    symptom=Symptom.RESTORED,
    subject=("database",),
)
def lost_messages(state: BrokerState) -> Counted:
    return _lost(state, ComparisonKind.LEDGER)


@CONDITIONS.declare(
    meaning="The broker delivered messages whose transactions are missing in the application's database, because this "
    "database was restored.",
    next_step="If there is a newer copy of the database, restore it. Otherwise a reconciliation lists the messages "
    "without a row (docs/operations/restore.md#restore). Finally, run `outbox_audit settle`.",
    concern=Concern.LOSS,
    symptom=Symptom.RESTORED,
    subject=("database",),
)
def lost_commits(state: BrokerState) -> Counted:
    return _lost(state, ComparisonKind.DECISION)


@CONDITIONS.declare(
    meaning="Groups have handled messages whose effects are now missing, because the handlers' database was restored.",
    next_step="Run the command in the evidence, which resets the group. The broker then delivers the messages again, "
    "and the inbox skips those whose effects still exist.",
    concern=Concern.LOSS,
    symptom=Symptom.RESTORED,
    subject=("database",),
    shown=Shown(listed=None, settled=Place("group", "Reset …", OF_GROUP, "reset")),
)
def lost_effects(state: BrokerState) -> Counted:
    return _lost(state, ComparisonKind.INBOX)


# ---------------------------------------------------------------------------------------------------------------------
# Undecided transactions: no producer answers the checks, or no producer knows the outcome.

# Up to three undecided transactions of a producer group, among the two hundred whose checks are due first.
_UNANSWERED: Final = Statement("""
SELECT transaction_id::text
FROM (SELECT transaction_id FROM {schema}.pending_check WHERE producer_group = %(group)s AND parked_at IS NULL
      ORDER BY due_at LIMIT 200) AS due
WHERE NOT EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = due.transaction_id)
LIMIT 3
""")
UNANSWERED_SECONDS: Final = Threshold(
    "unanswered_seconds", 120, 900, "seconds", "time for which a due check has had no answer"
)


@CONDITIONS.declare(
    meaning="No process of a producer group answers check-back, so the group's half messages stay undecided.",
    next_step="Start a worker of the service that published the messages. If one runs, its log says why checks fail. "
    "If the service is gone for good, decide each transaction: `outbox_transaction decide ID rollback`.",
    concern=Concern.UNDECIDED,
    symptom=Symptom.UNDECIDED,
    thresholds=(UNANSWERED_SECONDS,),
    shown=Shown(
        listed=Place("undecided", "Undecided transactions"),
        settled=Place("undecided", "Its transactions", {"group": "producer_group"}),
        figure="Undecided",
    ),
)
def unanswered(state: BrokerState) -> Iterator[Judged]:
    for one in state.summary.producers:
        due_seconds = state.summary.seconds_since(one.due_since)
        if severity := state.judge(UNANSWERED_SECONDS, due_seconds):
            examples = [row[0] for row in state.run.rows(_UNANSWERED, {"group": one.group})]
            named = ", ".join(examples) or f"`outbox_transaction list --group {one.group}` lists them"
            fact: Fact = {"producer_group": one.group, "undecided": one.undecided, "due_seconds": due_seconds}
            yield severity, {**fact, "transactions": named}


_PARKED: Final = Statement("""
SELECT transaction_id::text AS transaction, producer_group,
       extract(epoch FROM clock_timestamp() - parked_at)::double precision AS parked_seconds, park_reason AS reason,
       checks, last_answer AS answer
FROM (SELECT * FROM {schema}.pending_check WHERE parked_at IS NOT NULL ORDER BY parked_at LIMIT 200) AS pending
WHERE NOT EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = pending.transaction_id)
ORDER BY parked_at LIMIT %(limit)s
""")
PARKED_MESSAGES: Final = Threshold("parked_messages", 1, 100, "messages", "parked messages")


@CONDITIONS.declare(
    meaning="Check-back could not find the outcome of these transactions within its limits. On FIFO topics, later "
    "messages of their keys wait.",
    next_step="`outbox_message show ID` shows the answers of all checks. `outbox_transaction decide ID commit` and "
    "`outbox_transaction decide ID rollback` ask the ledger before they decide "
    "(docs/operations/messages.md#undecided-and-parked-transactions).",
    concern=Concern.UNDECIDED,
    symptom=Symptom.UNDECIDED,
    thresholds=(PARKED_MESSAGES,),
    shown=Shown(
        listed=Place("undecided", "Parked transactions", {"parked": "=yes"}),
        remedies=(
            Remedy("ask", "Ask again …", "plain", {"ids": "transaction"}),
            Remedy("decide", "Commit …", "good", {"id": "transaction", "decision": "=commit"}),
            Remedy("decide", "Roll back …", "bad", {"id": "transaction", "decision": "=rollback"}),
        ),
        figure="Undecided",
    ),
)
def parked(state: BrokerState) -> Counted:
    facts = state.facts(_PARKED, limit=EVIDENCE)
    count = max(len(facts), sum(group.parked for group in state.summary.producers))
    if count and not facts:
        # The oldest two hundred transactions were decided after the summary was counted.
        facts = [{"list": "`outbox_transaction list --parked` lists them"}]
    severity = state.judge(PARKED_MESSAGES, count)
    return Counted([(severity, fact) for fact in facts], count)


# ---------------------------------------------------------------------------------------------------------------------
# Consumer groups: no consumer, lag, stopped, blocked, failing.

# Without broadcast groups, which store no positions, so no message waits. A consumer that leaves its group sets the
# `expires_at` of its leases to the present time. The time is null if the group has never consumed the topic.
_NO_WORKER: Final = Statement("""
WITH known AS (
    SELECT group_id, topic.name, max(expires_at) AS expires_at
    FROM {schema}.consumer CROSS JOIN unnest(topics) AS topic (name) GROUP BY 1, 2
), unattended AS MATERIALIZED (
    SELECT subscription.group_id, topic_id, consumer_group.name AS group, topic.name AS topic, known.expires_at
    FROM {schema}.subscription JOIN {schema}.consumer_group USING (group_id) JOIN {schema}.topic USING (topic_id)
    LEFT JOIN known ON known.group_id = subscription.group_id AND known.name = topic.name
    WHERE NOT broadcast AND (known.expires_at IS NULL OR known.expires_at <= clock_timestamp())
), leased AS (
    -- Once for all: a look-up for each subscription would read all leases of its group.
    SELECT lease.group_id, queue.topic_id, max(lease.expires_at) AS expires_at
    FROM {schema}.queue_lease lease JOIN {schema}.queue USING (queue_id)
    WHERE lease.group_id IN (SELECT group_id FROM unattended) GROUP BY 1, 2
)
SELECT unattended.group, unattended.topic,
       extract(epoch FROM clock_timestamp() - greatest(leased.expires_at, unattended.expires_at))::double precision
FROM unattended LEFT JOIN leased USING (group_id, topic_id)
ORDER BY 1, 2
""")
NO_WORKER_SECONDS: Final = Threshold(
    "no_worker_seconds",
    10,
    30,
    "seconds",
    "time since the last consumer of a group left or lost its lease; a restart of a consumer takes less time",
)


@CONDITIONS.declare(
    meaning="A group subscribes to topics, but no consumer of the group runs.",
    next_step="Start a worker of the group's service with CONSUMER_PROCESSES above 0. If the group is gone for good, "
    "delete it (docs/operations/messages.md#rename-or-delete-a-group).",
    concern=Concern.WAITING,
    symptom=Symptom.WAITING,
    thresholds=(NO_WORKER_SECONDS,),
    shown=Shown(listed=Place("groups", "Groups without a worker", {"state": "=unattended"}), figure="Workers"),
)
def no_worker(state: BrokerState) -> Iterator[Judged]:
    # If a consumer process runs and fails, `process_failing` holds: another worker would not help.
    notes = [one for one in state.once(failing) if one.part in (ProcessPart.CONSUMING, ProcessPart.LEASES)]
    by_group: dict[str, dict[str, float | None]] = {}
    for group, topic, seconds in state.run.rows(_NO_WORKER):
        if not any(one.works_for(group) for one in notes):
            by_group.setdefault(group, {})[topic] = seconds
    lags = {(one.group, one.topic): one.lag for one in state.summary.groups} if by_group else {}
    for group, topics in by_group.items():
        lag = sum(lags.get((group, topic), 0) for topic in topics)
        shown = ", ".join(list(topics)[:EVIDENCE]) + (" …" if len(topics) > EVIDENCE else "")
        known = [seconds for seconds in topics.values() if seconds is not None]
        # If the group has never consumed a topic, its time without a consumer counts from the topic's first message.
        since = None if len(known) < len(topics) else max(known)
        severity = Severity.CRITICAL if since is None else state.judge(NO_WORKER_SECONDS, since)
        if severity and not lag:
            severity = Severity.WARNING
        yield severity, {"group": group, "topics": shown, "lag": lag, "without_worker_seconds": since}


LAG_SECONDS: Final = Threshold(
    "lag_seconds", 60, 600, "seconds", "age of the oldest waiting message, per group and topic"
)
LAG_MESSAGES: Final = Threshold("lag_messages", 10_000, 1_000_000, "messages", "waiting messages, per group and topic")


def waits(run: Executor) -> Mapping[tuple[str, str], Fact]:
    """Return what the messages of subscriptions wait for, as the parts know it."""
    found: dict[tuple[str, str], Fact] = {}
    for path in hooks.waits:
        found |= hooks.resolved(path)(run)
    return found


def _unrefused(state: BrokerState) -> list[Fact]:
    """Return the outages for which the condition `outage` holds. The others are facts of `connections_refused`."""
    return [fact for fact in state.once(outages) if not says_refused(fact["error"])]


def _lagging(state: BrokerState, *, paused: bool) -> list[Judged]:
    found: list[Judged] = []
    waiting = state.once(waits)
    holding_up = [] if paused else _unrefused(state)
    for one in state.summary.groups:
        if not one.lag or one.paused is not paused:
            continue
        # The condition `outage` has such messages, because more consumers would not help.
        if any(is_held_up(one, fact) for fact in holding_up):
            continue
        severity, age = _lag_of(state, one)
        fact: Fact = {"group": one.group, "topic": one.topic, "messages": one.lag, "oldest_seconds": age}
        fact = {**fact, **waiting.get((one.group, one.topic), {})}
        found.append((Severity.WARNING if paused else severity, fact))
    return sorted(found, key=lambda one: -float(one[1]["oldest_seconds"] or 0.0))


def _lag_of(state: BrokerState, one: GroupProgress) -> tuple[Severity | None, float | None]:
    age = state.summary.seconds_since(one.oldest_at)
    return worse(state.judge(LAG_SECONDS, age), state.judge(LAG_MESSAGES, one.lag)), age


def worse(*severities: Severity | None) -> Severity | None:
    """Return the worst of these severities; None if there is none."""
    return max(filter(None, severities), default=None)


@CONDITIONS.declare(
    meaning="A group is behind: its messages wait too long, or too many messages wait.",
    next_step="If the evidence names a limit, the group waits for this limit: raise it if the service that the "
    "handler calls allows it. If the evidence names no limit, add consumers, or fix the slow or blocked handler "
    "(docs/operations/deploy.md#scale). `outbox_group offsets GROUP` shows which queues are behind. If only one is, a "
    "failing message probably blocks it.",
    concern=Concern.WAITING,
    symptom=Symptom.WAITING,
    thresholds=(LAG_SECONDS, LAG_MESSAGES),
    shown=Shown(
        listed=Place("groups", "Groups that are behind", {"state": "=behind"}),
        settled=Place("group", "Its queues", OF_GROUP, "queues"),
        figure="Lag",
        may_be_symptom=True,
    ),
)
def lag(state: BrokerState) -> Iterable[Judged]:
    return _lagging(state, paused=False)


@CONDITIONS.declare(
    meaning="A group is paused, and messages wait for it.",
    next_step="The list of operator actions says who paused the group and why (docs/operations/page.md#audit). When "
    "the reason is gone, run `outbox_group resume GROUP`.",
    concern=Concern.ON_PURPOSE,
    symptom=Symptom.STOPPED,
    shown=Shown(
        listed=Place("groups", "Paused groups", {"state": "=paused"}),
        settled=Place("audit", "Who paused it, and why", {"action": "=pause"}),
        remedies=(RESUME,),
        figure="Lag",
    ),
)
def group_paused(state: BrokerState) -> Iterable[Judged]:
    return _lagging(state, paused=True)


@CONDITIONS.declare(
    meaning="An ordered handler fails again and again on one message, and the messages behind it wait.",
    next_step="Fix the handler, or skip the message (docs/operations/messages.md#skip-a-message). Another on_error "
    "policy can try the message again later, or make it a dead letter.",
    concern=Concern.WAITING,
    symptom=Symptom.STOPPED,
    shown=Shown(
        listed=Place("groups", "Groups with a failing queue", {"state": "=failing"}),
        remedies=(
            Remedy("skip", "Skip this message …", "bad", {"group": "group", "topic": "topic", "id": "message"}),
            PAUSE,
        ),
        figure="Lag",
    ),
)
def blocked_queue(state: BrokerState) -> Counted:
    blocked = [one for one in state.summary.groups if one.blocked]
    # Enough for the evidence. To look at every queue of the blocked groups takes seconds if they are many.
    places = sorted(blocked, key=lambda one: float(one.oldest_at or 0.0))[:EVIDENCE]
    groups, topics = {one.group for one in places}, {one.topic for one in places}
    facts: list[Judged] = []
    for one in list_blocked(state.run, sorted(groups), sorted(topics), limit=EVIDENCE) if places else []:
        assert one.blocked_since is not None
        fact = fact_of(
            one,
            *("group", "topic"),
            queue=one.number,
            message=str(one.blocked_by),
            key=one.blocked_key,
            blocked_seconds=state.summary.seconds_since(one.blocked_since.timestamp()),
            error=one.blocked_error,
        )
        facts.append((Severity.CRITICAL, fact))
    return Counted(facts, max(len(facts), sum(one.blocked for one in blocked)))


_STOPPED: Final = Statement("""
SELECT consumer_group.name AS group, topic.name AS topic, queue.number AS queue, lease.stopped AS error
FROM {schema}.queue_lease lease JOIN {schema}.consumer_group USING (group_id) JOIN {schema}.queue USING (queue_id)
JOIN {schema}.topic USING (topic_id)
WHERE stopped IS NOT NULL ORDER BY 1, 2, 3
""")


@CONDITIONS.declare(
    meaning="A handler failed, and its on_error policy stopped the queue.",
    next_step="`outbox_group offsets GROUP` shows the handler's error. Fix its cause, then run `outbox_group resume "
    "GROUP`.",
    concern=Concern.WAITING,
    symptom=Symptom.STOPPED,
    shown=Shown(
        listed=Place("groups", "Groups with a stopped queue", {"state": "=stopped"}), remedies=(RESUME,), figure="Lag"
    ),
)
def stopped_queue(state: BrokerState) -> Iterable[Judged]:
    return [(Severity.CRITICAL, fact) for fact in state.facts(_STOPPED)]


DEAD_LETTERS: Final = Threshold("dead_letters", 1, 1000, "messages", "dead letters of a group")


@CONDITIONS.declare(
    meaning="Messages of a group have become dead letters within the last day.",
    next_step="`outbox_dead_letter list GROUP` shows the errors. Fix the handler, then replay the dead letters "
    "(docs/operations/messages.md#dead-letters): `outbox_dead_letter replay GROUP --all`.",
    concern=Concern.HANDLERS,
    symptom=Symptom.HANDLERS,
    thresholds=(DEAD_LETTERS,),
    shown=Shown(
        listed=BY_ERROR,
        settled=Place("dead_letters", "Its errors", {"group": "group"}),
        remedies=(Remedy("replay", "Replay these …", "good", {"group": "group", "all": "=yes"}),),
        figure="Dead letters",
    ),
)
def dead_letters(state: BrokerState) -> Iterator[Judged]:
    for one in state.summary.rests:
        age = state.summary.seconds_since(one.newest_dead_at)
        if age is not None and age <= _EVENT_SECONDS:
            fact: Fact = {"group": one.group, "unsettled": one.dead, "newest_seconds": age}
            yield state.judge(DEAD_LETTERS, one.dead), fact


_RATE_WINDOW_SECONDS: Final = 60.0
# If a group sent back fewer messages in a minute, their share says nothing.
_FEW_SENT_BACK: Final = 100
RETRY_SHARE: Final = Threshold(
    "retry_share",
    0.5,
    0.9,
    "share",
    "messages that a group sent back for another attempt, divided by all that it sent back, handled or gave up in the "
    "last minute; counts from 100 sent-back messages on",
)


@CONDITIONS.declare(
    meaning="A group sends most of its messages back for another attempt.",
    next_step="A service that the group's handlers need is probably down. Check the errors. To pause the group until "
    "the service is back: `outbox_group pause GROUP`.",
    concern=Concern.HANDLERS,
    symptom=Symptom.HANDLERS,
    thresholds=(RETRY_SHARE,),
    shown=Shown(
        listed=Place("waiting", "Messages that are retried", {"retrying": "=yes"}), remedies=(PAUSE,), figure="Retrying"
    ),
)
def retry_storm(state: BrokerState) -> Iterator[Judged]:
    for one in growth(state.run, window_seconds=_RATE_WINDOW_SECONDS):
        if one.sent_back >= _FEW_SENT_BACK:
            share = one.sent_back / (one.handled + one.sent_back + one.dead)
            yield (
                state.judge(RETRY_SHARE, share),
                {"group": one.group, "sent_back": one.sent_back, "share": round(share, 3), "seconds": one.seconds},
            )


# A look counts at most this many messages of a retry queue, those that are due first, and ten times as many in all,
# because each costs a look-up of its error.
_RETRIES_COUNTED: Final = 500
# Errors belong together that have one type, and that the same line of the application has raised: the texts of most
# errors name the order or row that they are about. `groups.send_back.describe` has written them.
_RETRIED: Final = Statement("""
WITH waiting AS (
    SELECT retry_of, queue_id, queue.number, log_id, due_at
    FROM {schema}.topic JOIN {schema}.queue USING (topic_id)
    CROSS JOIN LATERAL (SELECT log_id, due_at, min(due_at) OVER () AS first_due_at FROM (
                            SELECT log_id, due_at FROM {schema}.scheduled
                            WHERE scheduled.queue_id = queue.queue_id AND attempt > 1 AND NOT claimed
                            ORDER BY due_at LIMIT %(limit)s) AS next) AS next
    WHERE retry_of IS NOT NULL
    ORDER BY first_due_at, queue_id, due_at LIMIT 10 * %(limit)s
), alike AS (
    SELECT retry_of AS group_id, number AS topic_id, count(*) AS messages, min(due_at) AS due_at,
           min(log_id) AS log_id, sum(count(*)) OVER (PARTITION BY queue_id)::bigint AS counted,
           (SELECT count(*) FROM waiting) AS counted_in_all
    FROM waiting
    CROSS JOIN LATERAL (SELECT error FROM {schema}.failure
                        WHERE failure.group_id = retry_of AND failure.log_id = waiting.log_id
                        ORDER BY attempt DESC LIMIT 1) AS last
    GROUP BY retry_of, queue_id, number, split_part(error, ':', 1), split_part(error, E'\n  raised in ', -1)
    ORDER BY messages DESC LIMIT 100
)
SELECT consumer_group.name AS group, topic.name AS topic, messages,
       (extract(epoch FROM clock_timestamp()) - extract(epoch FROM log.stored_at))::double precision AS oldest_seconds,
       date_trunc('second', due_at)::text AS next_attempt, message_id::text AS message, error, counted,
       counted_in_all
FROM alike JOIN {schema}.consumer_group USING (group_id) JOIN {schema}.topic USING (topic_id)
JOIN {schema}.commit_log log USING (log_id)
CROSS JOIN LATERAL (SELECT error FROM {schema}.failure
                    WHERE failure.group_id = alike.group_id AND failure.log_id = alike.log_id
                    ORDER BY attempt DESC LIMIT 1) AS last
ORDER BY messages DESC, 1, 2
""")


def retried_errors(run: Executor) -> list[dict[str, Any]]:
    """Return a fact for each error with which messages of a group and topic have failed at least twice, and wait.

    The most frequent error comes first. `message` is the oldest message with the error. `of_those_due_first` and
    `of_the_queues_due_first`: how many messages were counted, if more wait.
    """
    facts = run.objects(dict, _RETRIED, {"limit": _RETRIES_COUNTED})
    for fact in facts:
        if (counted := fact.pop("counted")) == _RETRIES_COUNTED:
            fact["of_those_due_first"] = counted
        if (in_all := fact.pop("counted_in_all")) == 10 * _RETRIES_COUNTED:
            fact["of_the_queues_due_first"] = in_all
    return facts


def kind_of(error: str) -> tuple[str, str]:
    """Return the type of a stored error and the line that has raised it, as the statement above groups errors."""
    return error.partition(":")[0], error.rpartition("\n  raised in ")[2]


FAILING_MESSAGES: Final = Threshold(
    "failing_messages", 3, None, "messages", "messages of a group and topic that failed twice or more with one error"
)


@CONDITIONS.declare(
    meaning="Messages of a group have failed at least twice with the same error, and wait for another attempt.",
    next_step="Find out what the messages have in common: a trigger, a constraint or the handler refuses them "
    "(docs/operations/messages.md#database-errors-of-handlers). The tab Retrying of the operations page lists these "
    "messages, and `outbox_message show ID` shows the attempts of one of them. Without a repair, they become dead "
    "letters, by default 2 h 46 min after the first attempt.",
    concern=Concern.WITHIN_DAYS,
    symptom=Symptom.HANDLERS,
    thresholds=(FAILING_MESSAGES,),
    shown=Shown(
        listed=Place("waiting", "Messages that are retried", {"retrying": "=yes"}),
        settled=Place("waiting", "Its retries", {"group": "group", "topic": "topic", "retrying": "=yes"}),
        figure="Retrying",
    ),
)
def failing_messages(state: BrokerState) -> Iterator[Judged]:
    paused = {(one["group"], one["topic"], *kind_of(one["error"])) for one in state.once(outages)}
    for fact in state.once(retried_errors):
        # An outage with this error has the messages.
        if (fact["group"], fact["topic"], *kind_of(fact["error"])) not in paused:
            yield state.judge(FAILING_MESSAGES, fact["messages"]), fact


# ---------------------------------------------------------------------------------------------------------------------
# Handlers that kill or hang their process, and subscriptions that pause because of an outage.

# A process that dies at least `_DEATHS` times within `_DEATHS_SECONDS` is in a crash loop. Each death is stored as an
# incident.
_DEATHS: Final = 3
_DEATHS_SECONDS: Final = 600.0
_CRASH_LOOPS: Final = Statement("""
SELECT subject AS process, count(*) AS deaths, max(at)::text AS last,
       (array_agg(detail ORDER BY incident_id DESC))[1] AS detail
FROM (SELECT * FROM {schema}.incident
      WHERE kind = 'process_died' AND at > clock_timestamp() - make_interval(secs => %(seconds)s)
      ORDER BY at DESC LIMIT 1000) AS recent
GROUP BY subject HAVING count(*) >= %(deaths)s ORDER BY 2 DESC
""")


@CONDITIONS.declare(
    meaning="A process of a worker has died three times or more within ten minutes.",
    next_step="The evidence says how the process died (signal 9 often means out of memory). Check the log of the "
    "process, new dead letters, and the condition `quarantined`.",
    concern=Concern.WAITING,
    symptom=Symptom.START,
    shown=Shown(listed=WORKERS, figure="Workers"),
)
def crash_loop(state: BrokerState) -> Iterable[Judged]:
    found = state.facts(_CRASH_LOOPS, seconds=_DEATHS_SECONDS, deaths=_DEATHS)
    return [(Severity.CRITICAL, fact) for fact in found]


# The first messages of one kind: they kill their process, or their handler hangs.
_QUARANTINED: Final = Statement("""
SELECT consumer_group.name AS group, log.message_id::text AS message, log.key, deaths,
       extract(epoch FROM clock_timestamp() - quarantined_at)::double precision AS quarantined_seconds, evidence,
       count(*) OVER () AS total
FROM {schema}.quarantined_message
JOIN {schema}.consumer_group USING (group_id) LEFT JOIN {schema}.commit_log log USING (log_id)
WHERE hung = %(hung)s::boolean
ORDER BY deaths DESC, quarantined_at LIMIT %(limit)s
""")


def _in_quarantine(state: BrokerState, *, hung: bool) -> Counted:
    facts = state.facts(_QUARANTINED, hung=hung, limit=EVIDENCE)
    total = max((fact.pop("total") for fact in facts), default=0)
    return Counted([(Severity.CRITICAL if one["deaths"] else Severity.WARNING, one) for one in facts], total)


@CONDITIONS.declare(
    meaning="A process died while it handled these messages, so each message is now handled alone. A message that "
    "has killed three processes alone becomes a dead letter.",
    next_step="`outbox_message show ID` shows the message. Fix the handler. If the message is already a dead letter, "
    "replay it (docs/operations/messages.md#handlers-that-kill-their-process).",
    concern=Concern.HANDLERS,
    symptom=Symptom.HANDLERS,
    shown=Shown(listed=WORKERS, remedies=(PAUSE,), figure="Workers"),
)
def quarantined(state: BrokerState) -> Counted:
    return _in_quarantine(state, hung=False)


@CONDITIONS.declare(
    meaning="Handlers run longer than their timeout and do not return.",
    next_step="Find the lock or the call for which the handlers wait, and give it a timeout "
    "(docs/operations/messages.md#handlers-that-hang).",
    concern=Concern.WAITING,
    symptom=Symptom.HANDLERS,
    shown=Shown(listed=WORKERS, remedies=(PAUSE,), figure="Workers"),
)
def hung_handlers(state: BrokerState) -> Counted:
    return _in_quarantine(state, hung=True)


@CONDITIONS.declare(
    meaning="A group pauses on a topic, because its handlers fail one after another with the same error. A service is "
    "down, a session holds a lock, or a table does not fit the code.",
    next_step="Restore the service that the error names. If a table or column is missing, compare models, migrations "
    "and table. If a right is missing, grant it (docs/operations/roles.md#rights-on-your-own-tables). After a lock "
    "timeout, end the session that the evidence names as `lock holder`; find out what a `possible lock holder` does "
    "before you end it (docs/operations/messages.md#database-errors-of-handlers). The next call that succeeds ends the "
    "outage.",
    concern=Concern.WAITING,
    symptom=Symptom.STOPPED,
    thresholds=(LAG_SECONDS, LAG_MESSAGES),
    shown=Shown(listed=Place("groups", "Groups"), remedies=(PAUSE,), figure="Lag"),
)
def outage(state: BrokerState) -> Iterable[Judged]:
    found: list[Judged] = []
    counted: set[tuple[str, str]] = set()
    for fact in _unrefused(state):
        waiting = [one for one in state.summary.groups if one.lag and is_held_up(one, fact)]
        # A group has one retry queue for all its topics. Its messages are counted at the group's first outage.
        waiting = [one for one in waiting if (one.group, one.topic) not in counted]
        counted |= {(one.group, one.topic) for one in waiting}
        judged = [_lag_of(state, one)[0] for one in waiting if not one.paused]
        named = {"group": fact["group"], "topic": fact["topic"], "messages": sum(one.lag for one in waiting)}
        found.append((worse(Severity.WARNING, *judged), {**named, **fact}))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Topics near their limits, and tables whose old rows are not removed in time.


@CONDITIONS.declare(
    meaning="A topic has reached 80 % of its `backlog_limit`. Above the limit, publishing to the topic raises "
    "TopicOverLimit or only logs warnings, depending on `on_limit`.",
    next_step="Start or speed up the workers of the group that is behind. If the group is gone for good, delete it. To "
    "accept messages now, raise the limit (docs/operations/sizing.md#limits-of-the-backlog).",
    concern=Concern.PUBLISHING,
    symptom=Symptom.DISK,
    shown=Shown(listed=Place("topics", "Topics")),
)
def topic_limit(state: BrokerState) -> Iterator[Judged]:
    for use in topic_limits.limit_uses(state.run, lags_of(state.summary)):
        is_refused = use.is_over and use.on_limit == "refuse"
        severity = Severity.CRITICAL if is_refused else Severity.WARNING if use.share >= topic_limits.NEAR else None
        yield severity, fact_of(use, "topic", "measure", "group", "value", "limit", "on_limit")


RETENTION_BEHIND_SECONDS: Final = Threshold(
    "retention_behind_seconds",
    3600,
    _DAY,
    "seconds",
    "how long the oldest row of the log, a ledger or an inbox is kept past its retention time; critical only for the "
    "log",
)


@CONDITIONS.declare(
    meaning="Consumed messages that are past their retention time were not removed.",
    next_step="Check the log of the broker process, and the conditions `transaction_open` and `lock_held`.",
    concern=Concern.DISK,
    symptom=Symptom.DISK,
    thresholds=(RETENTION_BEHIND_SECONDS,),
    shown=Shown(listed=Place("topics", "Topics")),
)
def retention_behind(state: BrokerState) -> Iterator[Judged]:
    for one in state.summary.topics:
        behind = state.summary.seconds_since(one.behind_since)
        yield state.judge(RETENTION_BEHIND_SECONDS, behind), {"topic": one.topic, "behind_seconds": behind}


@CONDITIONS.declare(
    meaning="A service does not remove old rows of its ledger or inbox in time, so the table grows.",
    next_step="Check the log of the service's worker, the condition `check_back_late`, and transactions that have "
    "been open for long.",
    concern=Concern.WITHIN_DAYS,
    symptom=Symptom.DISK,
    thresholds=(RETENTION_BEHIND_SECONDS,),
    subject=("alias", "table"),
)
def pruning_behind(state: BrokerState) -> Iterator[Judged]:
    for fact in presence.pruning_behind(state.run):
        # Rows that are kept for too long only take space; they neither lose nor delay a message.
        yield state.judge(RETENTION_BEHIND_SECONDS, fact["behind_seconds"]) and Severity.WARNING, fact


# ---------------------------------------------------------------------------------------------------------------------
# The broker's PostgreSQL: old transactions, locks, disk space, and replicas.

# Sessions and prepared transactions that hold back vacuum in this database. Without pg_read_all_stats, PostgreSQL shows
# only the id of another role's session.
_OPEN: Final = Statement("""
SELECT 'session ' || pid AS session, application_name AS application, coalesce(state, 'not visible') AS state,
       query_start::text, extract(epoch FROM clock_timestamp() - xact_start)::double precision AS age_seconds
FROM pg_stat_activity
WHERE (datname = current_database() OR backend_type = 'walsender') AND pid <> pg_backend_pid()
  AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL) AND xact_start IS NOT NULL
  -- Vacuum itself does not hold back vacuum.
  AND backend_type <> 'autovacuum worker'
UNION ALL
SELECT 'prepared transaction ' || quote_literal(gid), owner::text, 'prepared', NULL,
       extract(epoch FROM clock_timestamp() - prepared)::double precision
FROM pg_prepared_xacts WHERE database = current_database()
ORDER BY 5 DESC
""")
# Publishing transactions that were in progress when the broker last resynchronised, and whose begin this role cannot
# see. The statement finds them by their lock on op_log, because every role can see locks.
_HIDDEN_SINCE_RESYNC: Final = Statement("""
SELECT DISTINCT 'session ' || written.pid AS session, coalesce(application_name, '') AS application,
       'not visible' AS state, 'a resynchronisation' AS open_since_before
FROM pg_locks written
JOIN pg_locks held ON held.locktype = 'transactionid' AND held.granted AND held.mode = 'ExclusiveLock'
    AND held.virtualtransaction = written.virtualtransaction AND held.pid = written.pid
JOIN pg_stat_activity activity ON activity.pid = written.pid
WHERE written.relation = '{schema}.op_log'::regclass AND written.mode = 'RowExclusiveLock'
  AND written.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND activity.xact_start IS NULL
  -- Its savepoints' locks are not in the snapshot.
  AND held.transactionid IN (
      SELECT pg_snapshot_xip(snapshot)::xid
      FROM {schema}.resync WHERE incarnation = (SELECT max(incarnation) FROM {schema}.resync))
ORDER BY 1
""")
TRANSACTION_SECONDS: Final = Threshold(
    "transaction_seconds", 300, 3600, "seconds", "age of a transaction that holds back vacuum"
)


@CONDITIONS.declare(
    meaning="A transaction has been open for long, so vacuum cannot remove rows that this transaction might still "
    "see. Messages that the transaction has published wait until it ends.",
    next_step="If the evidence names a backup (pg_dump), let it end. Otherwise end the session: `SELECT "
    "pg_terminate_backend(PID)`. End a prepared transaction with COMMIT PREPARED or ROLLBACK PREPARED.",
    concern=Concern.DISK,
    symptom=Symptom.DISK,
    thresholds=(TRANSACTION_SECONDS,),
)
def transaction_open(state: BrokerState) -> Iterable[Judged]:
    return [
        *((state.judge(TRANSACTION_SECONDS, fact["age_seconds"]), fact) for fact in state.facts(_OPEN)),
        *((Severity.WARNING, fact) for fact in state.facts(_HIDDEN_SINCE_RESYNC)),
    ]


# Sessions of the broker, or that use its tables, and wait for a lock, with the sessions that block them.
_LOCKS: Final = Statement("""
SELECT coalesce('session ' || blocker.pid, 'a prepared transaction') AS session,
       blocker.application_name AS application, coalesce(blocker.state, 'not visible') AS state,
       blocker.query_start::text,
       extract(epoch FROM clock_timestamp() - blocker.xact_start)::double precision AS age_seconds,
       'session ' || waiting.pid || ' (' || waiting.application_name || ')' AS waiting,
       extract(epoch FROM clock_timestamp() - coalesce(lock.waitstart, waiting.state_change))::double precision
           AS waiting_seconds
FROM pg_stat_activity waiting
JOIN pg_locks lock ON lock.pid = waiting.pid AND NOT lock.granted
CROSS JOIN LATERAL unnest(pg_blocking_pids(waiting.pid)) AS blocking (pid)
LEFT JOIN pg_stat_activity blocker ON blocker.pid = blocking.pid
WHERE waiting.datname = current_database() AND waiting.wait_event_type = 'Lock'
  AND (waiting.application_name LIKE 'outbox%%'
       OR EXISTS (SELECT FROM pg_locks used JOIN pg_class ON pg_class.oid = used.relation
                  WHERE used.pid = waiting.pid AND relnamespace = '{schema}'::regnamespace))
ORDER BY waiting_seconds DESC
""")
LOCK_SECONDS: Final = Threshold(
    "lock_seconds", 5, 60, "seconds", "time for which a session of the broker waits for a lock"
)


@CONDITIONS.declare(
    meaning="A session holds a lock for which sessions of the broker wait.",
    next_step="End the blocking transaction, or its session: `SELECT pg_terminate_backend(PID)`. Set lock_timeout in "
    "your migrations, so that they give up soon.",
    concern=Concern.PUBLISHING,
    symptom=Symptom.PUBLISHING,
    thresholds=(LOCK_SECONDS,),
)
def lock_held(state: BrokerState) -> Iterable[Judged]:
    return [(state.judge(LOCK_SECONDS, fact["waiting_seconds"]), fact) for fact in state.facts(_LOCKS)]


# Sessions whose locks block even readers.
_EXCLUSIVE: Final = Statement("""
SELECT DISTINCT 'session ' || lock.pid AS session, application_name AS application,
       coalesce(state, 'not visible') AS state, query_start::text,
       extract(epoch FROM clock_timestamp() - xact_start)::double precision AS age_seconds, relname::text AS table
FROM pg_locks lock JOIN pg_class ON pg_class.oid = lock.relation
LEFT JOIN pg_stat_activity activity ON activity.pid = lock.pid
WHERE relnamespace = '{schema}'::regnamespace AND lock.granted AND lock.mode = 'AccessExclusiveLock'
  AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())
""")


def locked_out(run: Executor) -> list[Judged]:
    """Return the sessions that keep the broker's tables locked, or wait to lock them, without reading these tables."""
    found: Sequence[Fact] = [*run.objects(dict, _EXCLUSIVE), *run.objects(dict, _LOCKS)]
    return [(Severity.CRITICAL, fact) for fact in found or [{"session": "gone meanwhile"}]]


_SPACE: Final = Statement("""
SELECT relname::text, pg_total_relation_size(oid) FROM pg_class
WHERE relnamespace = '{schema}'::regnamespace AND relkind IN ('r', 'p') ORDER BY 2 DESC
""")
SPACE_BYTES: Final = Threshold("space_bytes", 50 * _GIBIBYTE, None, "bytes", "size of the broker's tables")


def table_sizes(run: Executor) -> dict[str, int]:
    """Return the size of each of the broker's tables with its indexes, in bytes, the largest first."""
    return dict(run.rows(_SPACE))


@CONDITIONS.declare(
    meaning="The broker's tables are larger than the threshold SPACE_BYTES.",
    next_step="If `retention_behind`, `lag` or `transaction_open` holds too, deal with that condition first. "
    "Otherwise shorten the topics' retention_seconds, or raise the threshold.",
    concern=Concern.WITHIN_DAYS,
    symptom=Symptom.DISK,
    thresholds=(SPACE_BYTES,),
)
def space(state: BrokerState) -> Iterator[Judged]:
    sizes = state.once(table_sizes)
    total = sum(sizes.values())
    largest = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in list(sizes.items())[:3])
    yield state.judge(SPACE_BYTES, total), {"bytes": total, "largest": largest}


# On a replica, the end of the received WAL counts as the end of the WAL.
_REPLICAS: Final = Statement("""
WITH head AS (
    SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_receive_lsn() ELSE pg_current_wal_lsn() END AS lsn
)
SELECT 'replica ' || coalesce(nullif(application_name, ''), 'pid ' || pid) AS replica,
       coalesce(state, 'not visible') AS state, pg_wal_lsn_diff(head.lsn, replay_lsn)::double precision AS bytes_behind
FROM pg_stat_replication, head
UNION ALL
SELECT 'slot ' || slot_name, CASE WHEN active THEN 'active' ELSE 'has no reader' END,
       pg_wal_lsn_diff(head.lsn, restart_lsn)::double precision
FROM pg_replication_slots, head WHERE restart_lsn IS NOT NULL AND NOT active
""")
REPLICA_LAG_BYTES: Final = Threshold(
    "replica_lag_bytes",
    _GIBIBYTE / 4,
    4 * _GIBIBYTE,
    "bytes",
    "WAL that a replica has not replayed, or that is kept for a disconnected replica",
)


@CONDITIONS.declare(
    meaning="A replica is behind its primary, or the server keeps WAL for a replica that is gone. The disk fills, and "
    "a failover would lose commits.",
    next_step="Find out why the replica is behind. If it is gone for good, drop its replication slot: `SELECT "
    "pg_drop_replication_slot(NAME)`.",
    concern=Concern.DISK,
    symptom=Symptom.RESTORED,
    thresholds=(REPLICA_LAG_BYTES,),
    subject=("replica",),
)
def replica_lag(state: BrokerState) -> Iterable[Judged]:
    return [(state.judge(REPLICA_LAG_BYTES, fact["bytes_behind"]), fact) for fact in state.facts(_REPLICAS)]
