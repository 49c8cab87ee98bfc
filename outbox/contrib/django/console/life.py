"""The life of one message: everything that is known to have happened to it, in the order of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from outbox.broker.operations.trace import Trace, TracedMessage
from outbox.broker.operations.trace_states import EntryState

_DECIDERS: Final = {"P": "the producer", "K": "check-back", "O": "an operator"}
_DECISIONS: Final = {"C": "Committed", "R": "Rolled back"}


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. `tone`: good, bad, warn or plain; `seconds`: since the event before."""

    at: datetime
    title: str
    detail: str = ""
    tone: str = "plain"
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """Where one group is with the message. `due_at`: its next attempt; failed attempts are (number, time, seconds since
    it was queued, error).
    """

    group: str
    state: str
    tone: str
    place: str
    attempts: int
    due_at: datetime | None
    failures: list[tuple[int, datetime, float | None, str]]


_TONES: Final = {
    EntryState.HANDLED: "good",
    EntryState.PASSED: "good",
    EntryState.DEAD: "bad",
    EntryState.EXPIRED: "bad",
    EntryState.SENT_BACK: "warn",
    EntryState.WAITING: "warn",
}


def state_of(trace: Trace, message: TracedMessage) -> tuple[str, str]:
    """A word for the message as a whole, and its tone."""
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
    return "committed", "good"


def events(trace: Trace, message: TracedMessage) -> list[Event]:
    """All of them, the first one first."""
    found = sorted((*_sent(trace, message), *_consumed(trace, message)), key=lambda one: one.at)
    return [
        Event(one.at, one.title, one.detail, one.tone, (one.at - before.at).total_seconds() if before else None)
        for one, before in zip(found, [None, *found[:-1]], strict=True)
    ]


def _sent(trace: Trace, message: TracedMessage) -> Iterator[Event]:
    by = f"by {message.producer_group}" if message.producer_group else ""
    yield Event(at(message.born_at), "Published", by)
    kind = "Stored as a half message" if message.half else "Stored with its decision"
    yield Event(at(message.stored_at), kind, "invisible until it is decided" if message.half else "")
    for answer in trace.answers:
        tone = "warn" if answer.answer == "UNKNOWN" else "plain"
        yield Event(at(answer.checked_at), f"Check-back answered {answer.answer}", answer.detail, tone)
    if trace.pending and trace.pending.parked_at:
        yield Event(at(trace.pending.parked_at), "Parked", f"reason: {trace.pending.park_reason or 'checks'}", "bad")
    if trace.decision:
        who = _DECIDERS.get(trace.decision.decided_by, trace.decision.decided_by)
        word = _DECISIONS.get(trace.decision.decision, trace.decision.decision)
        tone = "good" if word == "Committed" else "plain"
        yield Event(at(trace.decision.decided_at), word, f"decided by {who}", tone)
    if message.held_since:
        yield Event(at(message.held_since), "Held", "behind an earlier message of its key", "warn")
    if message.recalled_at:
        yield Event(at(message.recalled_at), "Recalled", "before its delivery time")


def _consumed(trace: Trace, message: TracedMessage) -> Iterator[Event]:
    queued = set()
    for entry in trace.entries:
        if entry.log_id == message.log_id and entry.queued_at and (entry.queue_id, entry.offset) not in queued:
            queued.add((entry.queue_id, entry.offset))
            again = f"for attempt {entry.attempt + 1} of {entry.group}, " if entry.topic.startswith("%RETRY%") else ""
            place = f"{again}queue {entry.queue} of {entry.topic}, offset {entry.offset}"
            yield Event(at(entry.queued_at), "Queued", place)
    for failure in trace.failures:
        if failure.log_id == message.log_id:
            title = f"{failure.group} failed on attempt {failure.attempt + 1}"
            yield Event(at(failure.failed_at), title, failure.error, "warn")
    for letter in trace.dead_letters:
        if letter.log_id == message.log_id:
            title = f"{letter.group} gave it up"
            yield Event(at(letter.dead_at), title, f"after {_attempts(letter.attempts)}", "bad")
            if letter.replayed_at:
                yield Event(at(letter.replayed_at), f"Dead letter of {letter.group} replayed")
            if letter.discarded_at:
                yield Event(at(letter.discarded_at), f"Dead letter of {letter.group} discarded")


def parts(trace: Trace, message: TracedMessage) -> list[Part]:
    """Every group that has to do with the message, by name; the newest queue entry says where it is."""
    newest = {entry.group: entry for entry in trace.entries if entry.log_id == message.log_id and entry.group}
    queued = {
        entry.group: entry.queued_at
        for entry in reversed(trace.entries)
        if entry.log_id == message.log_id and entry.queued_at
    }
    due = {retry.group: at(retry.due_at) for retry in trace.retries if retry.log_id == message.log_id}
    found = []
    for group, entry in sorted(newest.items()):
        first = queued.get(group)
        failures = [
            (one.attempt + 1, failed, (failed - at(first)).total_seconds() if first else None, one.error)
            for one in trace.failures
            if one.log_id == message.log_id and one.group == group
            for failed in [at(one.failed_at)]
        ]
        place = f"queue {entry.queue} of {entry.topic}, offset {entry.offset}"
        attempts = len(failures) + (entry.state in (EntryState.HANDLED, EntryState.PASSED))
        tone = _TONES.get(entry.state, "plain")
        found.append(Part(group, str(entry.state), tone, place, attempts, due.get(group), failures))
    return found


def at(text: str) -> datetime:
    """A time of a trace."""
    return datetime.fromisoformat(text)


def _attempts(count: int) -> str:
    return f"{count} attempt" if count == 1 else f"{count} attempts"
