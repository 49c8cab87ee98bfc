"""What operators do with messages that wait for the relay, and the lists whose figures on RocketMQ are others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final
from uuid import UUID

from outbox.broker.operations.dead_letters import DeadLetter
from outbox.contrib.django.actions import messages, transactions
from outbox.contrib.django.actions.declaration import ActionPlan, Field, FieldKind, Values, action, argument
from outbox.contrib.django.actions.listing import Asked, Column, Listing
from outbox.contrib.rocketmq import operations, relay_rows
from outbox.contrib.rocketmq.models import RelayEntry
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


_MESSAGE: Final = argument("message", "the id of a message in `outbox_relay list`", FieldKind.ID)


@action("retry_relayed", "Send a rejected message again", "outbox_relay retry", _MESSAGE, permission=None)
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


@action(
    "discard_relayed",
    "Discard a message that waits for the relay",
    "outbox_relay discard",
    _MESSAGE,
    permission=None,
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


def _read(run: None, asked: Asked) -> list[tuple[str, RelayEntry]]:
    return [
        (alias, row) for alias in relay_rows.relay_aliases() for row in relay_rows.first_rows(alias, asked["limit"])
    ]


def _as_json(found: tuple[str, RelayEntry]) -> Mapping[str, object]:
    alias, row = found
    return {
        "database": alias,
        "message_id": str(row.message_id),
        "transaction_id": str(row.transaction_id),
        "topic": row.topic,
        "key": row.key,
        "state": row.state,
        "born_at": row.born_at.isoformat(),
        "deliver_at": row.deliver_at and row.deliver_at.isoformat(),
        "attempts": row.attempts,
        "error": row.error,
    }


WAITING: Final = Listing(
    "relay",
    (
        Column("database", lambda one: one[0]),
        Column("message", lambda one: one[1].message_id),
        Column("topic", lambda one: one[1].topic),
        Column("key", lambda one: one[1].key),
        Column("state", lambda one: one[1].state),
        Column("published", lambda one: one[1].born_at),
        Column("attempts", lambda one: one[1].attempts),
        Column("error", lambda one: one[1].error),
    ),
    _read,
    of_broker=False,
    command="outbox_relay list",
    help="list the oldest waiting messages",
    fields=(Field("limit", "rows per database (default %(default)s)", FieldKind.COUNT, default=100),),
    json=_as_json,
)


# -- lists of RocketMQ's own messages --------------------------------------------------------------


_HERE: Final[Any] = {"engine": "rocketmq", "of_broker": False}


def _letters(run: None, asked: Asked) -> list[DeadLetter]:
    page = asked.only("settled", "after")
    return operations.list_letters(asked["group"], messages.selected(asked), **page, limit=asked.limit)


# RocketMQ's consumers note the error of the last attempt only.
LETTERS: Final = replace(
    messages.LETTERS, read=_letters, json=lambda one: {"letter": one, "failures": []}, tab="", **_HERE
)


def _open(run: None, asked: Asked) -> list[dict[str, Any]]:
    if asked["parked"] or asked["after"]:
        raise UsageError("RocketMQ has no parked transactions, and the list has one page: leave these options out.")
    return operations.open_transactions(asked["group"])[: asked.limit]


OPEN: Final = replace(
    transactions.OPEN,
    columns=[
        Column(name.replace("_", " "), name)
        for name in (
            *("transaction_id", "producer_group", "message_id", "topic", "key"),
            *("sent_at", "checks", "state", "broker", "ledger"),
        )
    ],
    read=_open,
    position=None,
    json=None,
    **_HERE,
)
