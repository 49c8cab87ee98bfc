"""The page that searches messages, and the page of one message with its history."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Final
from uuid import UUID

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect

from outbox import hooks
from outbox.broker.database.executor import Row, time_of
from outbox.broker.log.topics import list_topics
from outbox.broker.operations.broker_conditions import kind_of, outages
from outbox.broker.operations.conditions import Fact
from outbox.broker.operations.listings import may_run, open_transaction
from outbox.broker.operations.search import STATES, content_of, find_messages, unfinished_deliveries
from outbox.broker.operations.trace import EntryState, Trace, trace
from outbox.broker.transaction.turns import silent_groups
from outbox.codec import OWN_CONTENT_TYPES
from outbox.contrib.console.access import seeing
from outbox.contrib.console.asking import application, as_uuid, reading, text, value
from outbox.contrib.console.rendering import BODIES, PER_PAGE, paged, problem, render
from outbox.contrib.console.tabs import state_tabs
from outbox.contrib.django.actions.cells import readable
from outbox.contrib.django.actions.declaration import FieldKind, counted
from outbox.contrib.django.models import OperatorAction
from outbox.contrib.django.operations.claimed_messages import claimed_messages
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.views import may
from outbox.erased import ERASED_CONTENT_TYPE
from outbox.hooks import ShownBody
from outbox.utils.safe_text import inert, masked_names, masked_value

_HOUR: Final = timedelta(hours=1)
# The periods of time that a search can cover, by name. The first period is the default.
_SPANS: Final = {"hour": _HOUR, "day": 24 * _HOUR, "week": 7 * 24 * _HOUR}
# The colour of a group's state.
_TONES: Final = {
    EntryState.HANDLED: "good",
    EntryState.PASSED: "good",
    EntryState.DEAD: "bad",
    EntryState.EXPIRED: "bad",
    EntryState.TIMED_OUT: "warn",
    EntryState.SENT_BACK: "warn",
    EntryState.LEFT: "warn",
    EntryState.WAITING: "warn",
}
# The page of a message shows at most this many messages of its transaction.
_SHOWN: Final = 50


@seeing
def search(request: HttpRequest) -> HttpResponse:
    """Search by id, transaction id, business key, topic or time. If the search is empty, show the newest messages."""
    given = request.GET
    wanted, topic = text(given, "q"), text(given, "topic")
    found = as_uuid(wanted) if wanted else None
    if found is not None:
        with reading() as run:
            if trace(run, found) is not None:
                return redirect("outbox:message", found)
    state = text(given, "state")
    span = given.get("within") if given.get("within") in _SPANS else "hour"
    since = value(given, "since", FieldKind.TIME) or datetime.now(UTC) - _SPANS[str(span)]
    with reading() as run:
        tabs = state_tabs(run)
        topics = [one.name for one in list_topics(run)]
        rows = find_messages(
            run,
            wanted.strip() if wanted else None,
            topic,
            since=since,
            until=value(given, "until", FieldKind.TIME),
            before=value(given, "after", FieldKind.NUMBER),
            state=state if state in STATES else None,
            limit=PER_PAGE + 1,
        )
        left = unfinished_deliveries(run, [one.log_id for one in rows])
    context = {
        "title": "Messages",
        "page": paged(request, [(one, left[one.log_id]) for one in rows], lambda one: {"after": one[0].log_id}),
        "tabs": tabs,
        "state": "all",
        "states": STATES,
        "topics": topics,
        "given": given,
        "within": span,
        "since": since,
        "spans": list(_SPANS),
    }
    return render(request, "search", context)


@seeing
def message(request: HttpRequest, message_id: UUID) -> HttpResponse:
    """The page of one message, or of the first message of a transaction."""
    with reading() as run:
        found = trace(run, message_id)
        content = None
        if found is not None:
            shown_one = _chosen(found, message_id)
            opened = None if found.decision else open_transaction(run, UUID(shown_one.transaction_id))
            is_answered = opened is None or not silent_groups(run, [opened.transaction_id])
            if may(request, BODIES):
                content = content_of(run, UUID(shown_one.message_id))
        paused = {(one["group"], one["topic"]): one for one in outages(run)}
    if found is None:
        return problem(
            request,
            "No such message",
            f"The broker has no message or transaction {message_id}. Either this id was never stored, or retention "
            "removed the message after every group had consumed it.",
            status=404,
        )
    return render(request, "message", _context(found, shown_one, paused) | {
        "may_run": may_run(opened) if opened else "",
        "is_answered": is_answered,
        "content": content and shown(content, get_settings().masked_fields),
    })  # fmt: skip


def _context(found: Trace, one: Row, paused: Outages) -> dict[str, object]:
    state, tone = state_of(found, one)
    subjects = [f"transaction {one.transaction_id}", f"messages {one.message_id}"]
    with application():
        done = list(OperatorAction.objects.filter(subject__in=subjects).order_by("-id")[:20])
        claimed = claimed_messages([UUID(one.message_id)])
    dead = {letter.group for letter in found.dead_letters
            if letter.log_id == one.log_id and not letter.replayed_at and not letter.discarded_at}  # fmt: skip
    return {
        "title": f"Message {one.message_id}",
        "message": one,
        "state": state,
        "tone": tone,
        "is_undecided": found.decision is None,
        "pending": found.pending,
        "due_at": found.pending and time_of(found.pending.due_at),
        "is_overdue": found.pending is not None and time_of(found.pending.due_at) < datetime.now(UTC),
        "deliver_at": one.deliver_at and time_of(one.deliver_at),
        "transaction": _of_transaction(found, one) if len(found.messages) > 1 else [],
        "more": max(0, len(found.messages) - _SHOWN),
        "events": events(found, one),
        "parts": parts(found, one, paused),
        "dead_groups": sorted(dead),
        "passed_groups": sorted(
            {entry.group for entry in found.entries
             if entry.log_id == one.log_id and entry.group and entry.state in (EntryState.HANDLED, EntryState.PASSED)}
        ),
        "can_recall": bool(
            one.scheduled_for
            or [retry for retry in found.retries if retry.log_id == one.log_id and not retry.claimed]
        ),
        "done": done,
        "claimed": claimed,
    }  # fmt: skip


def _of_transaction(found: Trace, one: Row) -> list[tuple[Row, list[tuple[str, str]]]]:
    """The messages of a transaction, each with its state in each group as text and tone."""
    at = found.messages.index(one)
    shown = found.messages[:_SHOWN] if at < _SHOWN else [one, *found.messages[: _SHOWN - 1]]
    return [
        (
            message,
            [
                (f"{group}: {entry.state}", _TONES.get(entry.state, "plain"))
                for group, entry in sorted(_newest_entries(found, message).items())
            ],
        )
        for message in shown
    ]


def _chosen(found: Trace, message_id: UUID) -> Row:
    return next((one for one in found.messages if one.message_id == str(message_id)), found.messages[0])


# -- the history of a message -----------------------------------------------------------------------------

_DECIDERS: Final = {"P": "the producer", "K": "check-back", "O": "an operator"}
_DECISIONS: Final = {"C": "Committed", "R": "Rolled back"}


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a message. `seconds`: the time since the previous event."""

    at: datetime
    title: str
    detail: str = ""
    tone: str = "plain"
    seconds: float | None = None


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


def state_of(trace: Trace, message: Row) -> tuple[str, str]:
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


def _state_in_groups(trace: Trace, message: Row) -> tuple[str, str]:
    newest = _newest_entries(trace, message)
    if not newest:
        # The message is in no queue yet, or its topic has no subscribed group.
        return "committed", "good"
    discarded = {one.group for one in trace.dead_letters if one.log_id == message.log_id and one.discarded_at}
    states = [entry.state for group, entry in newest.items() if group not in discarded]
    for state, word in _WORST_FIRST:
        if state in states:
            count = states.count(state)
            said = word if count == len(newest) else f"{word} in {count} of {len(newest)} groups"
            return said, _TONES.get(state, "plain")
    if discarded:
        return "discarded", "plain"
    return "handled" if {EntryState.HANDLED, EntryState.PASSED} & set(states) else "committed", "good"


def events(trace: Trace, message: Row) -> list[Event]:
    """All events of the message. Each event comes after the events that must precede it.

    The clocks of producer and database differ, and a time taken at the beginning of a transaction is earlier than its
    events. If two times contradict the order of the steps, the events keep the order of the steps.
    """
    found = sorted([*_sent(trace, message), *_consumed(trace, message)], key=lambda one: one[0])
    shown = [event for _, event in found]
    return [
        replace(one, seconds=max(0.0, (one.at - before.at).total_seconds()) if before else None)
        for one, before in zip(shown, [None, *shown[:-1]], strict=True)
    ]


def _sent(trace: Trace, message: Row) -> Iterator[tuple[datetime, Event]]:
    """The events before the message is queued, each with the time by which events are sorted."""
    by = f"by {message.producer_group}" if message.producer_group else ""
    stored_at = time_of(message.stored_at)
    # The producer's clock may be ahead of the database's clock.
    yield min(time_of(message.born_at), stored_at), Event(time_of(message.born_at), "Published", by)
    kind = "Stored as a half message" if message.half else "Stored with its decision"
    yield stored_at, Event(stored_at, kind, "invisible until its transaction is decided" if message.half else "")
    last = stored_at
    for answer in trace.answers:
        tone = "warn" if answer.answer == "UNKNOWN" else "plain"
        last = max(last, time_of(answer.checked_at))
        yield last, Event(time_of(answer.checked_at), f"Check-back answered {answer.answer}", answer.detail, tone)
    if trace.pending and trace.pending.parked_at:
        parked_at = time_of(trace.pending.parked_at)
        yield parked_at, Event(parked_at, "Parked", f"reason: {trace.pending.park_reason or 'checks'}", "bad")
    if trace.decision:
        decided_at = time_of(trace.decision.decided_at)
        who = _DECIDERS.get(trace.decision.decided_by, trace.decision.decided_by)
        word = _DECISIONS.get(trace.decision.decision, trace.decision.decision)
        tone = "good" if word == "Committed" else "plain"
        # A check-back's answer comes before the decision that it causes.
        last = max(decided_at, last if trace.decision.decided_by == "K" else stored_at)
        yield last, Event(decided_at, word, f"decided by {who}", tone)
    if message.held_since:
        held_at = time_of(message.held_since)
        yield max(held_at, last), Event(held_at, "Held", "waits for an earlier message of its key", "warn")
    if message.recalled_at:
        recalled_at = time_of(message.recalled_at)
        yield max(recalled_at, last), Event(recalled_at, "Recalled", "no group gets the message")


def _consumed(trace: Trace, message: Row) -> Iterator[tuple[datetime, Event]]:
    """The events after the message was queued, each with the time by which events are sorted."""
    decided_at = time_of(trace.decision.decided_at) if trace.decision else time_of(message.stored_at)
    queued = set()
    for entry in trace.entries:
        if entry.log_id == message.log_id and (entry.queue_id, entry.offset) not in queued:
            queued.add((entry.queue_id, entry.offset))
            again = f"for attempt {entry.attempt + 1} in {entry.group}, " if entry.topic.startswith("%RETRY%") else ""
            place = f"{again}queue {entry.queue} of {readable(entry.topic)}, offset {entry.offset}"
            queued_at = time_of(entry.queued_at)
            yield max(queued_at, decided_at), Event(queued_at, "Queued", place)
    for failure in trace.failures:
        if failure.log_id == message.log_id:
            title = f"{failure.group} failed on attempt {failure.attempt + 1}"
            yield time_of(failure.failed_at), Event(time_of(failure.failed_at), title, failure.error, "warn")
    for letter in trace.dead_letters:
        if letter.log_id == message.log_id:
            settled_at = letter.replayed_at or letter.discarded_at
            dead_at = time_of(letter.dead_at)
            # The last failure caused the dead letter. Failures after a replay belong to the next series of attempts.
            failed = [
                time_of(one.failed_at)
                for one in trace.failures
                if (one.log_id, one.group) == (letter.log_id, letter.group)
                and (settled_at is None or time_of(one.failed_at) <= time_of(settled_at))
            ]
            given_up = max([dead_at, *failed])
            detail = f"after {counted(letter.attempts, 'attempt')}"
            yield given_up, Event(dead_at, f"Dead letter of {letter.group}", detail, "bad")
            if letter.replayed_at:
                replayed_at = time_of(letter.replayed_at)
                yield max(replayed_at, given_up), Event(replayed_at, f"Dead letter of {letter.group} replayed")
            if letter.discarded_at:
                discarded_at = time_of(letter.discarded_at)
                yield max(discarded_at, given_up), Event(discarded_at, f"Dead letter of {letter.group} discarded")
    for one in trace.timed_out:
        if one.log_id == message.log_id:
            timed_out_at = time_of(one.timed_out_at)
            detail = "its time limit was over before an attempt"
            yield timed_out_at, Event(timed_out_at, f"Timed out in {one.group}", detail, "warn")


# The outages of now, by group and topic.
Outages = Mapping[tuple[str, str], Fact]
_UNFINISHED: Final = (EntryState.WAITING, EntryState.SENT_BACK, EntryState.LEFT)


def _newest_entries(trace: Trace, message: Row) -> dict[str, Row]:
    """For each group, the newest queue entry of the message."""
    return {entry.group: entry for entry in trace.entries if entry.log_id == message.log_id and entry.group}


def parts(trace: Trace, message: Row, paused: Outages) -> list[dict[str, object]]:
    """The message's state in every group for which it has a queue entry, by the newest one, sorted by group name.

    `due_at`: the time of the next attempt. `failures`: the failed attempts, of which those in a row with one kind of
    error are together. `outage`: the outage for whose end the message waits.
    """
    newest = _newest_entries(trace, message)
    queued = {entry.group: entry.queued_at for entry in reversed(trace.entries) if entry.log_id == message.log_id}
    due = {
        retry.group: time_of(retry.due_at)
        for retry in trace.retries
        if retry.log_id == message.log_id and not retry.claimed
    }
    found: list[dict[str, object]] = []
    for group, entry in sorted(newest.items()):
        first = queued[group]
        failed = [one for one in trace.failures if one.log_id == message.log_id and one.group == group]
        failures = [_folded(list(alike), first) for _, alike in groupby(failed, key=lambda one: kind_of(one.error))]
        place = f"queue {entry.queue} of {readable(entry.topic)}, offset {entry.offset}"
        attempts = len(failed) + (entry.state in (EntryState.HANDLED, EntryState.PASSED))
        found.append(
            {
                "group": group,
                "state": str(entry.state),
                "tone": _TONES.get(entry.state, "plain"),
                "place": place,
                "attempts": attempts,
                "due_at": due.get(group),
                "failures": failures,
                "outage": paused.get((group, message.topic)) if entry.state in _UNFINISHED else None,
            }
        )
    return found


def _folded(alike: Sequence[Row], queued_at: str) -> dict[str, object]:
    """Failed attempts with one kind of error, and the newest error.

    `seconds`: since the message was first queued, until the first one failed.
    """
    first, last = alike[0], alike[-1]
    first_at = time_of(first.failed_at)
    seconds = (first_at - time_of(queued_at)).total_seconds()
    times = {"first_at": first_at, "last_at": time_of(last.failed_at), "seconds": seconds}
    return {"first": first.attempt + 1, "last": last.attempt + 1, **times, "error": last.error}


# -- the content of a message, without the fields of OUTBOX['MASKED_FIELDS'] --------------------------------

SHOWN: Final = 64 * 1024
_UNREADABLE: Final = 4 * 1024


def shown(content: Row, masked: Mapping[str, frozenset[str]]) -> dict[str, object]:
    """The body and headers of a message as text: escaped, without masked fields, and short enough for a page."""
    names = masked_names(masked, content.topic)
    size, content_type = content.size, content.content_type
    if (stored := _in_the_form_of_a_part(content)) is not None:
        body, note = "", stored.note
        size, content_type = stored.size or size, stored.content_type or content_type
    else:
        body, note = _body(content, names)
    if len(body) > SHOWN:
        body, note = body[:SHOWN], f"Only the first {SHOWN:,} characters are shown. {note}".strip()
    headers = json.dumps(masked_value(content.headers, names), indent=2, ensure_ascii=False) if content.headers else ""
    texts = {"body": inert(body, keep="\n\t"), "headers": inert(headers, keep="\n\t"), "note": note}
    return {"content_type": content_type, "size": size, **texts}


def _body(content: Row, names: Collection[str]) -> tuple[str, str]:
    if content.content_type == ERASED_CONTENT_TYPE:
        return "", "The body was erased."
    hidden = "", "The body is not shown: it is not JSON, so its masked fields cannot be found."
    try:
        text = content.body.decode()
    except UnicodeDecodeError:
        if names:
            return hidden
        left = f": its first {_UNREADABLE:,} bytes" if len(content.body) > _UNREADABLE else ", so it is shown"
        return content.body[:_UNREADABLE].hex(" "), f"Not UTF-8 text{left} in hexadecimal."
    try:
        found = json.loads(text)
        masked = masked_value(found, names)
        note = "Fields named in OUTBOX['MASKED_FIELDS'] are masked." if masked != found else ""
        return json.dumps(masked, indent=2, ensure_ascii=False), note
    except (ValueError, RecursionError):
        return hidden if names else (text, "")


def _in_the_form_of_a_part(content: Row) -> ShownBody | None:
    """Return what the page shows instead of a body in the form of a part; None for another body."""
    if content.content_type == ERASED_CONTENT_TYPE or not content.content_type.startswith(OWN_CONTENT_TYPES):
        return None
    form = hooks.body_forms.get(content.content_type)
    if form is None:
        return ShownBody("A part of outbox has stored the body, and this process does not have the part.")
    found: ShownBody = hooks.resolved(form.shown)(content.body)
    return found
