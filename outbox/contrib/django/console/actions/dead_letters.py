"""Settling dead letters: replay or discard one, the ticked ones, or all with one error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from django.http import QueryDict

from outbox.broker.operations.dead_letters import LetterSelection
from outbox.contrib.django.console.actions.plan import ActionPlan, PageAction
from outbox.contrib.django.console.asking import as_uuid, moment, required, text
from outbox.contrib.django.operations import commands as operations
from outbox.errors import UsageError

LIMIT: Final = 10_000

_Settle = Callable[..., int]


def _replay(given: QueryDict) -> ActionPlan:
    return _settle(
        given,
        operations.replay_dead_letters,
        "Deliver {count} dead letters again to group {group}{which}, each with a new series of attempts.",
        "First correct the cause of the handler's failure, or the messages fail again.",
    )


def _discard(given: QueryDict) -> ActionPlan:
    return _settle(
        given,
        operations.discard_dead_letters,
        "Discard {count} dead letters of group {group}{which}: the group never handles them.",
        "This cannot be undone.",
    )


def _settle(given: QueryDict, settle: _Settle, effect: str, caution: str) -> ActionPlan:
    group = required(given, "group")
    # Dead letters that arrive after this page was shown are not included.
    until = moment(given, "until") or datetime.now(UTC)
    selection = _selection(given, until)
    count = settle(group, selection, limit=LIMIT, dry_run=True)
    which = _described(selection)
    more = f" At most {LIMIT:,} are settled at once: repeat this action for the rest." if count == LIMIT else ""

    def do() -> Mapping[str, Any]:
        return {"settled": settle(group, selection, limit=LIMIT, dry_run=False)}

    return ActionPlan(
        subject=f"dead letters of group {group}",
        effect=effect.format(count=count, group=group, which=which) + more,
        caution=caution,
        before={"selected": count, "selection": which.strip() or "all"},
        pinned={"until": until.isoformat()},
        nothing=count == 0,
        do=do,
    )


def _selection(given: QueryDict, until: datetime) -> LetterSelection:
    ids = [as_uuid(value) for value in given.getlist("message")]
    wanted = [one for one in ids if one is not None]
    if len(wanted) != len(ids):
        raise UsageError("One of the messages is not a message id.")
    selection = LetterSelection(
        message_ids=wanted or None,
        topic=text(given, "topic"),
        key=text(given, "key"),
        error=text(given, "error"),
        error_type=text(given, "error_type"),
        until=until,
    )
    if selection == LetterSelection(until=until) and given.get("all") != "yes":
        raise UsageError("No dead letter is selected: tick some, or select all with one error.")
    return selection


def _described(selection: LetterSelection) -> str:
    if selection.message_ids is not None:
        return f" ({', '.join(map(str, selection.message_ids[:20]))}{' …' if len(selection.message_ids) > 20 else ''})"
    given = {
        "whose error is of type": selection.error_type,
        "whose error contains": selection.error,
        "of topic": selection.topic,
        "with key": selection.key,
    }
    return "".join(f" {words} {value}" for words, value in given.items() if value is not None)


ACTIONS = (
    PageAction("replay", "Deliver dead letters again", _replay),
    PageAction("discard", "Discard dead letters", _discard),
)
