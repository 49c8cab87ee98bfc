"""Recalling waiting messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from django.http import QueryDict

from outbox.contrib.django.console.actions.plan import ActionPlan, PageAction
from outbox.contrib.django.console.asking import as_uuid, text
from outbox.contrib.django.operations import commands as operations
from outbox.errors import UsageError
from outbox.recall import Recall

# At most this many messages are named in the audit.
_NOTED: Final = 100


def _recall(given: QueryDict) -> ActionPlan:
    ids = [found for value in given.getlist("message") if (found := as_uuid(value)) is not None]
    topic, key = text(given, "topic"), text(given, "key")
    if not ids and (topic is None or key is None):
        raise UsageError("No message is selected: tick messages, or give a topic and a key.")

    def outcomes(*, dry_run: bool) -> list[Recall]:
        return operations.recall_messages(ids, topic=None if ids else topic, key=None if ids else key, dry_run=dry_run)

    planned = outcomes(dry_run=True)
    count = sum(one.is_recalled for one in planned)
    left = [f"{one.message_id} is {one.status}" for one in planned if not one.is_recalled]

    def do() -> Mapping[str, Any]:
        return _counted(outcomes(dry_run=False))

    return ActionPlan(
        subject=f"messages {', '.join(map(str, ids[:20]))}" if ids else f"key {key} of topic {topic}",
        effect=f"Recall {count} messages that wait for their delivery time or a retry: no group gets them (again).",
        caution="This cannot be undone." + (f" Not recalled: {'; '.join(left[:20])}." if left else ""),
        before=_counted(planned),
        nothing=count == 0,
        do=do,
    )


def _counted(outcomes: list[Recall]) -> Mapping[str, Any]:
    shown = {str(one.message_id): str(one.status) for one in outcomes[:_NOTED]}
    return (
        shown | {"messages": len(outcomes)} | ({"not_listed": len(outcomes) - _NOTED} if len(outcomes) > _NOTED else {})
    )


ACTIONS = (PageAction("recall", "Take back messages", _recall),)
