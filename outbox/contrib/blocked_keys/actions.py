"""The action that unblocks a key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outbox.broker.database.executor import Executor
from outbox.contrib.blocked_keys.blocking import list_blocked_keys, unblock
from outbox.contrib.django.actions.declaration import ActionPlan, Values, action, argument, counted
from outbox.contrib.django.actions.groups import GROUP, TOPIC
from outbox.contrib.django.database.aliases import broker_connection
from outbox.errors import UsageError


@action(
    "unblock",
    "Let the messages of a blocked key pass its dead letter",
    "outbox_group unblock",
    *(GROUP, TOPIC, argument("key", "the blocked key")),
    permission=None,
)
def _unblock(values: Values) -> ActionPlan:
    asked = group, topic, key = values["group"], values["topic"], values["key"]
    with broker_connection() as (connection, schema):
        found = list_blocked_keys(Executor(connection, schema), *asked)
    if not found:
        raise UsageError(f"no messages of key {key!r} of topic {topic!r} wait in group {group!r}.")
    [one] = found
    if one.state != "failed":
        raise UsageError(
            f"key {key!r} was not unblocked: its message {one.message_id} is being tried in group {group!r}. The "
            "waiting messages follow it. If it fails for good, unblock the key then."
        )

    def do() -> Mapping[str, Any]:
        with broker_connection() as (connection, schema):
            unblock(Executor(connection, schema), *asked)
        return {"released": one.waiting}

    return ActionPlan(
        subject=f"key {key} of topic {topic} in group {group}",
        effect=f"Deliver {counted(one.waiting, 'waiting message')} of the key in order, although message "
        f"{one.message_id} before them is not handled. It stays a dead letter.",
        caution="If you replay this dead letter later, the group handles it after the other messages of its key.",
        dangerous=True,
        before={"waiting": one.waiting, "message_id": str(one.message_id)},
        do=do,
    )
