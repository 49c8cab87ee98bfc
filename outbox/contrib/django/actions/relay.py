"""The actions on messages that wait for the relay: send a rejected message again, or discard a message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final
from uuid import UUID

from outbox.contrib.django.actions.declaration import ActionField, ActionPlan, DeclaredAction, FieldKind, Values
from outbox.contrib.django.ledger import relay_rows
from outbox.contrib.django.models import RelayEntry
from outbox.errors import UsageError


def _found(message_id: UUID) -> tuple[str, RelayEntry]:
    for alias in relay_rows.relay_aliases():
        if (row := relay_rows.rows_on(alias).defer("body").filter(message_id=message_id).first()) is not None:
            return alias, row
    raise UsageError(
        f"message {message_id} does not wait for the relay: it was sent, or it was never published for the relay. "
        "`outbox_relay list` shows the waiting messages."
    )


def _state(alias: str, row: RelayEntry | None) -> Mapping[str, Any]:
    if row is None:
        return {"state": "sent or discarded"}
    return {"state": row.state, "database": alias, "topic": row.topic, "attempts": row.attempts, "error": row.error}


def _change_row(message_id: UUID, change: Callable[[str, UUID], Any], alias: str) -> Mapping[str, Any]:
    change(alias, message_id)
    return _state(alias, relay_rows.rows_on(alias).defer("body").filter(message_id=message_id).first())


def _retry(values: Values) -> ActionPlan:
    alias, row = _found(UUID(str(values["message"])))
    return ActionPlan(
        subject=f"message {row.message_id}",
        effect=f"Let the relay send message {row.message_id} for topic {row.topic} again. After RocketMQ has confirmed "
        "it, the later messages of its key follow.",
        before=_state(alias, row),
        nothing=row.parked_at is None,
        do=lambda: _change_row(row.message_id, relay_rows.retry, alias),
    )


def _discard(values: Values) -> ActionPlan:
    alias, row = _found(UUID(str(values["message"])))

    def discard(alias: str, message_id: UUID) -> None:
        if not relay_rows.discard(alias, message_id) and not relay_rows.remove_unsent(alias, message_id):
            raise UsageError(f"message {message_id} was not discarded: the relay has taken it, and may have sent it.")

    return ActionPlan(
        subject=f"message {row.message_id}",
        effect=f"Delete message {row.message_id} for topic {row.topic}: no consumer gets it. The later messages of its "
        "key are sent.",
        caution="This cannot be undone.",
        dangerous=True,
        before=_state(alias, row),
        refusal="" if row.state != "taken" else "The relay has taken the message, and may have sent it.",
        do=lambda: _change_row(row.message_id, discard, alias),
    )


_MESSAGE: Final = ActionField(
    name="message", kind=FieldKind.ID, required=True, positional=True, help="the id of a message in `outbox_relay list`"
)

ACTIONS: Final = (
    DeclaredAction(
        name="retry_relayed",
        title="Send a rejected message again",
        command="outbox_relay retry",
        fields=(_MESSAGE,),
        plan=_retry,
        permission=None,
    ),
    DeclaredAction(
        name="discard_relayed",
        title="Discard a message that waits for the relay",
        command="outbox_relay discard",
        fields=(_MESSAGE,),
        plan=_discard,
        permission=None,
    ),
)
