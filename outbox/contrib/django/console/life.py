"""The history of one message: all known events, in order of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from typing import Final

from outbox.broker.database.executor import time_of
from outbox.broker.operations.trace import EntryState, Trace, TracedEntry, TracedFailure, TracedMessage
from outbox.contrib.django.console.readable import readable

_DECIDERS: Final = {"P": "the producer", "K": "check-back", "O": "an operator"}
_DECISIONS: Final = {"C": "Committed", "R": "Rolled back"}


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a message.

    `tone`: good, bad, warn or plain. `seconds`: the time since the previous event.
    """

    at: datetime
    title: str
    detail: str = ""
    tone: str = "plain"
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class FailedAttempts:
    """Failed attempts in a row with the same error.

    `seconds`: the time from the moment at which the message was first queued until the first of these attempts failed.
    """

    first: int
    last: int
    first_at: datetime
    last_at: datetime
    seconds: float | None
    error: str


@dataclass(frozen=True, slots=True)
class GroupDelivery:
    """The message's state in one group. `due_at`: the time of the next attempt."""

    group: str
    state: str
    tone: str
    place: str
    attempts: int
    due_at: datetime | None
    failures: list[FailedAttempts]


_TONES: Final = {
    EntryState.HANDLED: "good",
    EntryState.PASSED: "good",
    EntryState.DEAD: "bad",
    EntryState.EXPIRED: "bad",
    EntryState.TIMED_OUT: "warn",
    EntryState.CLAIMED: "plain",
    EntryState.SENT_BACK: "warn",
    EntryState.LEFT: "warn",
    EntryState.RECALLED: "plain",
    EntryState.WAITING: "warn",
}


# The heading of a message shows the worst of its states in the groups.
_WORST_FIRST: Final = (
    (EntryState.DEAD, "dead letter"),
    (EntryState.EXPIRED, "expired"),
    (EntryState.TIMED_OUT, "timed out"),
    (EntryState.SENT_BACK, "retrying"),
    (EntryState.CLAIMED, "claimed"),
    (EntryState.LEFT, "waiting"),
    (EntryState.WAITING, "waiting"),
    (EntryState.RECALLED, "recalled"),
)


def state_of(trace: Trace, message: TracedMessage) -> tuple[str, str]:
    """The state of the message over all its groups, as text, and its `tone` (good, bad, warn or plain)."""
    if trace.decision is None:
        return ("parked", "bad") if trace.pending and trace.pending.parked_at else ("undecided", "warn")
    if trace.decision.decision == "R":
        return "rolled back", "plain"
    if message.recalled_at:
        return "recalled", "plain"
    if message.held_since:
        return "held", "warn"
    if message.scheduled_for:
        return "delayed", "warn"
    return _state_in_groups(trace, message)


def _state_in_groups(trace: Trace, message: TracedMessage) -> tuple[str, str]:
    newest = _newest_entries(trace, message)
    if not newest:
        # The message is in no queue yet, or its topic has no subscribed group.
        return "committed", "good"
    discarded = {one.group for one in trace.dead_letters if one.log_id == message.log_id and one.discarded_at}
    states = [entry.state for group, entry in newest.items() if group not in discarded]
    for state, word in _WORST_FIRST:
        if state in states:
            count = states.count(state)
            return (word if count == len(newest) else f"{word} in {count} of {len(newest)} groups"), _TONES[state]
    if discarded:
        return "discarded", "plain"
    return "handled" if {EntryState.HANDLED, EntryState.PASSED} & set(states) else "committed", "good"


def events(trace: Trace, message: TracedMessage) -> list[Event]:
    """All events of the message. Each event comes after the events that must precede it.

    The clocks of the producer and the database differ. Also, a time taken at the beginning of a transaction is earlier
    than the transaction's events. If two times contradict the order of the steps, the events keep the order of the
    steps.
    """
    found: list[tuple[datetime, Event]] = []
    for steps in (_sent(trace, message), _consumed(trace, message)):
        found += steps
    found.sort(key=lambda one: one[0])
    shown = [event for _, event in found]
    return [
        replace(one, seconds=max(0.0, (one.at - before.at).total_seconds()) if before else None)
        for one, before in zip(shown, [None, *shown[:-1]], strict=True)
    ]


def _sent(trace: Trace, message: TracedMessage) -> Iterator[tuple[datetime, Event]]:
    """The events before the message is queued, each with the time by which events are sorted."""
    by = f"by {message.producer_group}" if message.producer_group else ""
    stored_at = at(message.stored_at)
    # The producer's clock may be ahead of the database's clock.
    yield min(at(message.born_at), stored_at), Event(at(message.born_at), "Published", by)
    kind = "Stored as a half message" if message.half else "Stored with its decision"
    yield stored_at, Event(stored_at, kind, "invisible until its transaction is decided" if message.half else "")
    last = stored_at
    for answer in trace.answers:
        tone = "warn" if answer.answer == "UNKNOWN" else "plain"
        last = max(last, at(answer.checked_at))
        yield last, Event(at(answer.checked_at), f"Check-back answered {answer.answer}", answer.detail, tone)
    if trace.pending and trace.pending.parked_at:
        parked_at = at(trace.pending.parked_at)
        yield parked_at, Event(parked_at, "Parked", f"reason: {trace.pending.park_reason or 'checks'}", "bad")
    if trace.decision:
        decided_at = at(trace.decision.decided_at)
        who = _DECIDERS.get(trace.decision.decided_by, trace.decision.decided_by)
        word = _DECISIONS.get(trace.decision.decision, trace.decision.decision)
        tone = "good" if word == "Committed" else "plain"
        # A check-back's answer comes before the decision that it causes.
        last = max(decided_at, last if trace.decision.decided_by == "K" else stored_at)
        yield last, Event(decided_at, word, f"decided by {who}", tone)
    if message.held_since:
        held_at = at(message.held_since)
        yield max(held_at, last), Event(held_at, "Held", "waits for an earlier message of its key", "warn")
    if message.recalled_at:
        recalled_at = at(message.recalled_at)
        yield max(recalled_at, last), Event(recalled_at, "Recalled", "no group gets the message")


def _consumed(trace: Trace, message: TracedMessage) -> Iterator[tuple[datetime, Event]]:
    """The events after the message was queued, each with the time by which events are sorted."""
    decided_at = at(trace.decision.decided_at) if trace.decision else at(message.stored_at)
    queued = set()
    for entry in trace.entries:
        if entry.log_id == message.log_id and (entry.queue_id, entry.offset) not in queued:
            queued.add((entry.queue_id, entry.offset))
            again = f"for attempt {entry.attempt + 1} of {entry.group}, " if entry.topic.startswith("%RETRY%") else ""
            place = f"{again}queue {entry.queue} of {readable(entry.topic)}, offset {entry.offset}"
            queued_at = at(entry.queued_at)
            yield max(queued_at, decided_at), Event(queued_at, "Queued", place)
    for failure in trace.failures:
        if failure.log_id == message.log_id:
            title = f"{failure.group} failed on attempt {failure.attempt + 1}"
            yield at(failure.failed_at), Event(at(failure.failed_at), title, failure.error, "warn")
    for letter in trace.dead_letters:
        if letter.log_id == message.log_id:
            settled_at = letter.replayed_at or letter.discarded_at
            dead_at = at(letter.dead_at)
            # The last failure caused the dead letter. Failures after a replay belong to the next series of attempts.
            failed = [
                at(one.failed_at)
                for one in trace.failures
                if (one.log_id, one.group) == (letter.log_id, letter.group)
                and (settled_at is None or at(one.failed_at) <= at(settled_at))
            ]
            given_up = max([dead_at, *failed])
            detail = f"after {_attempts(letter.attempts)}"
            yield given_up, Event(dead_at, f"Dead letter of {letter.group}", detail, "bad")
            if letter.replayed_at:
                replayed_at = at(letter.replayed_at)
                yield max(replayed_at, given_up), Event(replayed_at, f"Dead letter of {letter.group} replayed")
            if letter.discarded_at:
                discarded_at = at(letter.discarded_at)
                yield max(discarded_at, given_up), Event(discarded_at, f"Dead letter of {letter.group} discarded")
    for one in trace.timed_out:
        if one.log_id == message.log_id:
            timed_out_at = at(one.timed_out_at)
            detail = "its time limit was over before an attempt"
            yield timed_out_at, Event(timed_out_at, f"Timed out in {one.group}", detail, "warn")


def _newest_entries(trace: Trace, message: TracedMessage) -> dict[str, TracedEntry]:
    """For each group, the newest queue entry of the message."""
    return {entry.group: entry for entry in trace.entries if entry.log_id == message.log_id and entry.group}


def parts(trace: Trace, message: TracedMessage) -> list[GroupDelivery]:
    """The message's state in every group for which the message has a queue entry, sorted by group name.

    If a group has several queue entries of the message, the newest entry gives the state.
    """
    newest = _newest_entries(trace, message)
    queued = {entry.group: entry.queued_at for entry in reversed(trace.entries) if entry.log_id == message.log_id}
    due = {
        retry.group: at(retry.due_at) for retry in trace.retries if retry.log_id == message.log_id and not retry.claimed
    }
    found = []
    for group, entry in sorted(newest.items()):
        first = queued[group]
        failed = [one for one in trace.failures if one.log_id == message.log_id and one.group == group]
        failures = [_folded(list(alike), first) for _, alike in groupby(failed, key=lambda one: one.error)]
        place = f"queue {entry.queue} of {readable(entry.topic)}, offset {entry.offset}"
        attempts = len(failed) + (entry.state in (EntryState.HANDLED, EntryState.PASSED))
        tone = _TONES.get(entry.state, "plain")
        found.append(GroupDelivery(group, str(entry.state), tone, place, attempts, due.get(group), failures))
    return found


def _folded(alike: Sequence[TracedFailure], queued_at: str) -> FailedAttempts:
    first_at = at(alike[0].failed_at)
    seconds = (first_at - at(queued_at)).total_seconds()
    numbers = (alike[0].attempt + 1, alike[-1].attempt + 1)
    return FailedAttempts(*numbers, first_at, at(alike[-1].failed_at), seconds, alike[0].error)


def at(text: str) -> datetime:
    """Parse a time of a trace."""
    return time_of(text)


def _attempts(count: int) -> str:
    return f"{count} attempt" if count == 1 else f"{count} attempts"
