"""Quarantine messages that may kill or hang their process.

A group handles each quarantined message alone, and then removes the message from quarantine or gives it up.

When a process dies, its parent puts the messages of the running calls into quarantine (table `quarantined_message`),
because one of them may be a poison message. A process handles a quarantined message alone, and a group handles one such
message at a time. Before the attempt, the process commits a note; if the handler returns or raises, it removes the
message from quarantine. If a process dies while it handles only this message, one death is counted against it, and
after the third one the message becomes a dead letter.

If a whole host fails, no parent records the death, but the note shows that an instance has vanished during an attempt.
Vanished instances count as deaths if they were on at least two hosts. An instance that was only frozen or cut off
deletes the record when it continues. The group gives up an innocent message only if its process is killed from outside
in each of three attempts; an operator can replay it from the dead letters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from outbox.broker.database import arrays
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.groups import leases, members

DEATHS_TO_GIVE_UP: Final = 3
# The wait (seconds) while another instance handles a quarantined message of the group.
_LOOK_AGAIN_SECONDS: Final = 0.5

# The wait (seconds) before the next attempt: after 0, 1, 2, 3, … deaths and vanished instances 0, 1, 4, 16, …, at
# most ten minutes.
_PAUSE: Final = "CASE WHEN {0} > 0 THEN least(600, power(4, least({0}, 10) - 1)) ELSE 0 END"


@dataclass(frozen=True, slots=True)
class RunningCall:
    """A handler call that was running when its process ended."""

    group_id: int
    log_ids: Sequence[int]
    alone: bool


@dataclass(frozen=True, slots=True)
class QuarantinedMessage:
    """A row of the table `quarantined_message`."""

    group_id: int
    log_id: int
    call_size: int
    hung: bool


@dataclass(frozen=True, slots=True)
class QuarantineAttempt:
    """Whether a quarantined message may be handled now: at once, after `wait_seconds`, or never because of `deaths`."""

    wait_seconds: float = 0.0
    deaths: str = ""


_QUARANTINE = Statement(f"""
INSERT INTO {{schema}}.quarantined_message AS known (group_id, log_id, call_size, deaths, hung, evidence, due_at)
SELECT DISTINCT ON (group_id, log_id) group_id, log_id, call_size, deaths, %(hung)s, %(evidence)s,
       clock_timestamp() + make_interval(secs => {_PAUSE.format("deaths")})
FROM unnest(%(group_ids)s::integer[], %(log_ids)s::bigint[], %(sizes)s::integer[], %(deaths)s::integer[])
    AS given (group_id, log_id, call_size, deaths)
ORDER BY group_id, log_id
ON CONFLICT (group_id, log_id) DO UPDATE
SET call_size = excluded.call_size, deaths = known.deaths + excluded.deaths, hung = known.hung AND excluded.hung,
    evidence = excluded.evidence, seen_at = clock_timestamp(),
    due_at = clock_timestamp() + make_interval(secs => {_PAUSE.format("known.deaths + excluded.deaths")})""")
_END_ATTEMPTS = Statement("""
UPDATE {schema}.quarantined_message SET tried_by = NULL, tried_on = NULL WHERE tried_by = %(instance)s
""")
_WITHDRAW = Statement("DELETE FROM {schema}.vanished_trial WHERE instance_id = %(instance)s")


def record_death(run: Executor, instance: UUID, calls: Sequence[RunningCall], *, evidence: str, hung: bool) -> None:
    """Record that an instance has died during `calls`: quarantine the calls' messages, release the instance's queues.

    If the instance handled one message alone, one more death is counted against this message. `hung` says that the
    process has ended itself because handlers hang. After the commit, the caller sends a notification on Channel.SHARED.
    """
    alone = not hung and len(calls) == 1 and calls[0].alone and len(calls[0].log_ids) == 1
    quarantined = [(call.group_id, log_id, len(call.log_ids)) for call in calls for log_id in call.log_ids]
    with run.connection.transaction():
        # The parent has seen this death, so the instance must not also count as vanished.
        run.execute(_WITHDRAW, {"instance": instance})
        run.execute(_END_ATTEMPTS, {"instance": instance})
        if quarantined:
            group_ids, log_ids, sizes = zip(*quarantined, strict=True)
            parameters = {
                "group_ids": arrays.integers(group_ids),
                "log_ids": arrays.bigints(log_ids),
                "sizes": arrays.integers(sizes),
                "deaths": arrays.integers([int(alone)] * len(quarantined)),
            }
            run.execute(_QUARANTINE, {**parameters, "hung": hung, "evidence": evidence})
        leases.release_all(run, instance)
        members.leave_groups(run, instance)


_OF_GROUPS = Statement("""
SELECT group_id, log_id, call_size, hung FROM {schema}.quarantined_message
WHERE group_id = ANY(%(group_ids)s::integer[])
""")


def of_groups(run: Executor, group_ids: Sequence[int]) -> dict[int, dict[int, QuarantinedMessage]]:
    """Return the quarantined messages by group id and log id."""
    found: dict[int, dict[int, QuarantinedMessage]] = {group_id: {} for group_id in group_ids}
    if not found:
        return found
    for message in run.objects(QuarantinedMessage, _OF_GROUPS, {"group_ids": arrays.integers(group_ids)}):
        found[message.group_id][message.log_id] = message
    return found


# This lock allows only one attempt at a time in a group: an instance that wants to begin an attempt waits for this row.
_LOCK_GROUP = Statement("SELECT 1 FROM {schema}.consumer_group WHERE group_id = %(group_id)s FOR UPDATE")

# If an instance vanishes while it tries several messages, or while other calls run, its end proves nothing about any
# single message.
_NOTE_VANISHED = Statement(f"""
WITH gone AS (
    SELECT s.group_id, s.log_id, s.tried_by, s.tried_on,
           NOT s.hung AND (SELECT count(*) = 1 FROM {{schema}}.quarantined_message t
                           WHERE t.tried_by = s.tried_by) AS alone,
           s.deaths + (SELECT count(*)::integer FROM {{schema}}.vanished_trial v
                       WHERE v.group_id = s.group_id AND v.log_id = s.log_id) + 1 AS times
    FROM {{schema}}.quarantined_message s
    WHERE s.group_id = %(group_id)s AND s.tried_by IS NOT NULL
      AND NOT EXISTS (SELECT FROM {{schema}}.consumer c
                      WHERE c.instance_id = s.tried_by AND c.group_id = s.group_id AND c.expires_at > clock_timestamp())
), noted AS (
    INSERT INTO {{schema}}.vanished_trial (group_id, log_id, instance_id, host)
    SELECT group_id, log_id, tried_by, tried_on FROM gone WHERE alone
    ON CONFLICT DO NOTHING
)
UPDATE {{schema}}.quarantined_message s
SET tried_by = NULL, tried_on = NULL, seen_at = clock_timestamp(),
    due_at = clock_timestamp() + make_interval(secs => {_PAUSE.format("gone.times")})
FROM gone WHERE s.group_id = gone.group_id AND s.log_id = gone.log_id
""")
_STANDING = Statement("""
SELECT s.deaths + CASE WHEN gone.hosts >= 2 THEN gone.times ELSE 0 END AS deaths, s.evidence,
       greatest(0, extract(epoch FROM s.due_at - clock_timestamp()))::double precision AS seconds
FROM {schema}.quarantined_message s
CROSS JOIN LATERAL (
    SELECT count(DISTINCT host) AS hosts, count(*) AS times FROM {schema}.vanished_trial v
    WHERE v.group_id = s.group_id AND v.log_id = s.log_id
) AS gone
WHERE s.group_id = %(group_id)s AND s.log_id = ANY(%(log_ids)s::bigint[])
""")
_TRIED_ELSEWHERE = Statement("""
SELECT EXISTS (SELECT FROM {schema}.quarantined_message s
               JOIN {schema}.consumer c ON c.instance_id = s.tried_by AND c.group_id = s.group_id
               WHERE s.group_id = %(group_id)s AND s.tried_by <> %(instance)s AND c.expires_at > clock_timestamp())
""")
_BEGIN_ATTEMPT = Statement("""
UPDATE {schema}.quarantined_message SET tried_by = %(instance)s, tried_on = %(host)s
WHERE group_id = %(group_id)s AND log_id = ANY(%(log_ids)s::bigint[])
""")


def begin_attempt(
    run: Executor, instance: UUID, host: str, group_id: int, log_ids: Sequence[int], *, by_all: bool = False
) -> QuarantineAttempt:
    """Commit a note that this instance handles these messages now, or return why it may not handle them.

    `by_all` says that every instance handles these messages (broadcast), so the instances do not wait for each other.
    """
    values = {"group_id": group_id, "log_ids": arrays.bigints(log_ids), "instance": instance, "host": host}
    with run.connection.transaction():
        run.execute(_LOCK_GROUP, values)
        run.execute(_NOTE_VANISHED, values)
        attempt = _judge(run, values, by_all=by_all)
        if not attempt.deaths and not attempt.wait_seconds:
            run.execute(_BEGIN_ATTEMPT, values)
    return attempt


def ask(
    run: Executor, instance: UUID, group_id: int, log_ids: Sequence[int], *, by_all: bool = False
) -> QuarantineAttempt:
    """Return the result that `begin_attempt` would probably have now, without storing a note."""
    values = {"group_id": group_id, "log_ids": arrays.bigints(log_ids), "instance": instance}
    return _judge(run, values, by_all=by_all)


def _judge(run: Executor, values: Mapping[str, object], *, by_all: bool) -> QuarantineAttempt:
    standing = run.rows(_STANDING, values)
    for deaths, evidence, _ in standing:
        if deaths >= DEATHS_TO_GIVE_UP:
            return QuarantineAttempt(deaths=f"{deaths} times; the last time: {evidence}")
    seconds = max((seconds for _, _, seconds in standing), default=0.0)
    [elsewhere] = run.one(_TRIED_ELSEWHERE, values)
    if seconds > 0 or (elsewhere and not by_all):
        return QuarantineAttempt(wait_seconds=max(seconds, _LOOK_AGAIN_SECONDS))
    return QuarantineAttempt()


_CLEAR = Statement("""
DELETE FROM {schema}.quarantined_message WHERE group_id = %(group_id)s AND log_id = ANY(%(log_ids)s::bigint[])
""")


def clear(run: Executor, group_id: int, log_ids: Sequence[int]) -> None:
    """Remove messages from quarantine, because their handler has returned or the group has given them up."""
    run.execute(_CLEAR, {"group_id": group_id, "log_ids": arrays.bigints(log_ids)})


_HANG = Statement(f"""
UPDATE {{schema}}.quarantined_message
SET deaths = deaths + 1, evidence = %(evidence)s, seen_at = clock_timestamp(), call_size = 1, tried_by = NULL,
    tried_on = NULL, due_at = clock_timestamp() + make_interval(secs => {_PAUSE.format("deaths + 1")})
WHERE group_id = %(group_id)s AND log_id = ANY(%(log_ids)s::bigint[])
""")


def record_hang(run: Executor, group_id: int, log_ids: Sequence[int], evidence: str) -> None:
    """Count a hang of a quarantined message in the same way as a death."""
    run.execute(_HANG, {"group_id": group_id, "log_ids": arrays.bigints(log_ids), "evidence": evidence})


def end_attempts(run: Executor, instance: UUID) -> None:
    """Delete the notes of this instance, because its attempts were not started or because it leaves its groups."""
    run.execute(_END_ATTEMPTS, {"instance": instance})


def withdraw_vanished(run: Executor, instance: UUID) -> None:
    """Delete the rows that say that this instance has vanished, because it was only frozen or cut off."""
    run.execute(_WITHDRAW, {"instance": instance})


_FORGET_PASSED = Statement("""
DELETE FROM {schema}.quarantined_message known
USING {schema}.consume_queue entry, unnest(%(queue_ids)s::integer[], %(offsets)s::bigint[]) AS moved (queue_id, first)
WHERE known.group_id = %(group_id)s AND entry.log_id = known.log_id
  AND entry.queue_id = moved.queue_id AND entry.queue_offset < moved.first
""")


def forget_passed(run: Executor, group_id: int, offsets: Mapping[int, int]) -> None:
    """Take the messages out of quarantine that the group does not get any more, because an operator moves it to
    `offsets` (by queue id). Call it before the leases of these queues are locked."""
    ids, firsts = arrays.integers(list(offsets)), arrays.bigints(list(offsets.values()))
    run.execute(_FORGET_PASSED, {"group_id": group_id, "queue_ids": ids, "offsets": firsts})


_FORGET = Statement("DELETE FROM {schema}.quarantined_message WHERE seen_at < clock_timestamp() - interval '7 days'")


def forget_the_old(run: Executor) -> None:
    """Delete the quarantined messages that no instance has handled for a week.

    Retention has removed them, or their group does not run.
    """
    run.execute(_FORGET)
