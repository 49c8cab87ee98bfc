"""The page that searches messages, and the page of one message with its history."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect

from outbox.broker.log.topics import list_topics
from outbox.broker.operations.listings import open_transaction
from outbox.broker.operations.search import STATES, content_of, find_messages, unfinished_deliveries
from outbox.broker.operations.trace import EntryState, Trace, TracedMessage, trace
from outbox.broker.transaction.turns import silent_groups
from outbox.contrib.django.console import life
from outbox.contrib.django.console.access import seeing
from outbox.contrib.django.console.asking import application, as_uuid, moment, number, reading, text
from outbox.contrib.django.console.masking import shown
from outbox.contrib.django.console.rendering import BODIES, PER_PAGE, may, paged, problem, render
from outbox.contrib.django.console.states import state_tabs
from outbox.contrib.django.engine.operator_table import is_on_rocketmq
from outbox.contrib.django.models import OperatorAction
from outbox.contrib.django.operations.claimed_messages import claimed_messages
from outbox.contrib.django.settings.conf import get_settings

_HOUR: Final = timedelta(hours=1)
# The periods of time that a search can cover, by name. The first period is the default.
_SPANS: Final = {"hour": _HOUR, "day": 24 * _HOUR, "week": 7 * 24 * _HOUR}


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
    since = moment(given, "since") or datetime.now(UTC) - _SPANS[str(span)]
    with reading() as run:
        tabs = state_tabs(run)
        topics = [one.name for one in list_topics(run)]
        rows = find_messages(
            run,
            wanted.strip() if wanted else None,
            topic,
            since=since,
            until=moment(given, "until"),
            before=number(given, "after"),
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
    if is_on_rocketmq():
        return _message_on_server(request, message_id)
    with reading() as run:
        found = trace(run, message_id)
        content = None
        if found is not None:
            shown_one = _chosen(found, message_id)
            opened = None if found.decision else open_transaction(run, UUID(shown_one.transaction_id))
            is_answered = opened is None or not silent_groups(run, [opened.transaction_id])
            if may(request, BODIES):
                content = content_of(run, UUID(shown_one.message_id))
    if found is None:
        return problem(
            request,
            "No such message",
            f"The broker has no message or transaction {message_id}. Either this id was never stored, or retention "
            "removed the message after every group had consumed it.",
            status=404,
        )
    return render(request, "message", _context(found, shown_one) | {
        "may_run": opened.may_run if opened else "",
        "is_answered": is_answered,
        "content": content and shown(content, get_settings().masked_fields),
    })  # fmt: skip


def _message_on_server(request: HttpRequest, message_id: UUID) -> HttpResponse:
    from outbox.contrib.django.operations.rocketmq import find_path

    found = find_path(message_id)
    if found is None:
        return problem(
            request,
            "No such message",
            f"RocketMQ has no message {message_id} on the topics of this project, and no group has handled it.",
            status=404,
        )
    return render(request, "rocketmq_message", {"title": f"Message {message_id}", "found": found})


def _context(found: Trace, one: TracedMessage) -> dict[str, object]:
    state, tone = life.state_of(found, one)
    subjects = [f"transaction {one.transaction_id}", f"messages {one.message_id}"]
    with application():
        done = list(OperatorAction.objects.filter(subject__in=subjects).order_by("-id")[:20])
        claimed = claimed_messages([UUID(one.message_id)])
    dead = {letter.group for letter in found.dead_letters
            if letter.log_id == one.log_id and not letter.replayed_at and not letter.discarded_at}  # fmt: skip
    return {
        "title": f"Message {one.message_id}",
        "message": one,
        "others": [other for other in found.messages if other is not one],
        "state": state,
        "tone": tone,
        "is_undecided": found.decision is None,
        "pending": found.pending,
        "due_at": found.pending and life.at(found.pending.due_at),
        "is_overdue": found.pending is not None and life.at(found.pending.due_at) < datetime.now(UTC),
        "deliver_at": one.deliver_at and life.at(one.deliver_at),
        "events": life.events(found, one),
        "parts": life.parts(found, one),
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


def _chosen(found: Trace, message_id: UUID) -> TracedMessage:
    return next((one for one in found.messages if one.message_id == str(message_id)), found.messages[0])
