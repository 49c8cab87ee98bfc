"""Actions on messages: recall waiting messages, deliver a handled one again, and replay or discard dead letters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, Final
from uuid import UUID

from django.db import router
from django.db.utils import DatabaseError

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.log import recall
from outbox.broker.log.topics import TopicCatalog
from outbox.broker.operations import changes, dead_letters
from outbox.broker.operations.dead_letters import DeadLetter, LetterSelection, failed_attempts, list_dead_letters
from outbox.broker.operations.listings import group_now
from outbox.broker.operations.search import FoundMessage, find_messages
from outbox.contrib.django.actions.cells import badge, error, group_link, inert, message_link, shortened
from outbox.contrib.django.actions.declaration import (
    LEFT,
    ActionPlan,
    Button,
    Field,
    FieldKind,
    Offer,
    Values,
    action,
    argument,
    at_most,
    counted,
)
from outbox.contrib.django.actions.groups import GROUP
from outbox.contrib.django.actions.listing import Asked, Choice, Column, Listing
from outbox.contrib.django.database.aliases import broker_executor, on_broker
from outbox.contrib.django.engine.broker import get_broker
from outbox.contrib.django.ledger import handled
from outbox.contrib.django.ledger.ledger_checker import ledger_aliases, open_connection
from outbox.contrib.django.operations.known_conditions import observer
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import LedgerUnavailable, UsageError
from outbox.recall import Recall
from outbox.utils.safe_text import masked_names

# The audit names at most this many messages.
_NOTED: Final = 100
# The table of a command shows at most this many characters of each body. With --json, it prints the whole body.
_SHOWN_CHARACTERS: Final = 60

_NOW = Statement("SELECT clock_timestamp()")

_MESSAGES: Final = Field("ids", "message ids", FieldKind.ID, positional=True, many=True)
SELECTION: Final = (
    Field("error", "only dead letters whose last error contains this text"),
    Field("error_type", "only dead letters whose last error is of this type (class name without module)"),
    Field("topic", "only dead letters of this topic"),
    Field("key", "only dead letters with this key"),
    Field(
        "since",
        "only messages that became dead letters at this time or later; ISO 8601 with a time zone",
        FieldKind.TIME,
    ),
    Field("until", "only messages that became dead letters before this time; ISO 8601", FieldKind.TIME),
)
SETTLING: Final = (
    GROUP,
    _MESSAGES,
    *SELECTION,
    Field("all", "all dead letters of the group", FieldKind.FLAG),
    at_most("dead letters"),
)


def settle_letters(group: str, selection: LetterSelection, *, replay: bool, limit: int, dry_run: bool) -> int:
    """Replay or discard dead letters of a group, the oldest first, and return their number.

    Raises UnknownGroup. If one of the ids is not a dead letter of the group, raises UsageError and settles no message.
    """
    if (server := observer()) is not None:
        return server.settle_letters(group, selection, limit=limit, replay=replay, dry_run=dry_run)
    settle, done = (dead_letters.replay, "replayed") if replay else (dead_letters.discard, "discarded")
    count = settle_selected(settle, done, group, selection, limit=limit, dry_run=dry_run)
    if replay and not dry_run:
        get_broker().notify_decided()
    return count


def settle_selected(
    settle: Callable[..., int], done: str, group: str, selection: LetterSelection, *, limit: int, dry_run: bool
) -> int:
    """Call `settle(run, group, selection, limit=…)`, which returns a number of letters, in a transaction.

    If one of the ids is not among these letters, the function raises UsageError, and nothing is `done`.
    """
    with broker_executor() as run, run.connection.transaction(force_rollback=dry_run):
        count: int = settle(run, group, selection, limit=limit)
        ids = selection.message_ids
        if ids is not None and count != len(set(ids)):
            raise UsageError(
                f"{count} of the {len(set(ids))} ids are dead letters of group {group!r} that match the other "
                f"options (or --limit is too low), so nothing was {done}. `outbox_dead_letter list {group}` lists "
                f"the dead letters of the group."
            )
    return count


# -- dead letters ---------------------------------------------------------------------------------------


def _letter_buttons(verb: str, tone: str) -> Mapping[str, Offer]:
    def of_letter(one: DeadLetter) -> Sequence[Button]:
        fields = {"group": one.group, "ids": one.message_id}
        return [] if one.replayed_at or one.discarded_at else [Button(f"{verb} …", tone, fields)]

    def of_message(page: Mapping[str, Any]) -> Sequence[Button]:
        ids = page["message"].message_id
        return [Button(f"{verb} for {one} …", tone, {"group": one, "ids": ids}) for one in page["dead_groups"]]

    return {
        "letters": of_letter,
        "letters selected": lambda _: [Button(f"{verb} the selected ones …", tone)],
        "error": lambda one: [Button(f"{verb} all …", tone, {"group": one.group, "error_type": one.error_type})],
        "message": of_message,
    }


@action(
    "replay",
    "Deliver dead letters again",
    "outbox_dead_letter replay",
    *SETTLING,
    buttons={
        **_letter_buttons("Replay", "good"),
        "dead letters of a group": lambda group: [Button("Replay all …", "good", {"group": group, "all": "yes"})],
    },
)
def _replay(values: Values) -> ActionPlan:
    server = observer()
    return _settling(
        values,
        "Deliver {letters} again to group {group}{which}, each with a new series of attempts.",
        "First correct the cause of the handler's failure, or the messages fail again."
        + ("" if server is None else f" {server.REPLAY_CAUTION}"),
        replay=True,
    )


@action(
    "discard",
    "Discard dead letters",
    "outbox_dead_letter discard",
    *SETTLING,
    buttons=_letter_buttons("Discard", "bad"),
)
def _discard(values: Values) -> ActionPlan:
    return _settling(
        values,
        "Discard {letters} of group {group}{which}, which the group then never handles.",
        "This cannot be undone.",
        replay=False,
    )


def _settling(values: Values, effect: str, caution: str, *, replay: bool) -> ActionPlan:
    group, limit = values["group"], values["limit"]
    selection, which = pinned_selection(values)
    settle = partial(settle_letters, group, selection, replay=replay, limit=limit)
    count = settle(dry_run=True)
    more = (
        f" One action settles at most {limit:,} dead letters: repeat the action for the other dead letters."
        if count == limit
        else ""
    )

    assert selection.until is not None
    return ActionPlan(
        subject=f"dead letters of group {group}",
        effect=effect.format(letters=counted(count, "dead letter"), group=group, which=which) + more,
        caution=caution,
        dangerous=not replay,
        before={"selected": count, "selection": which.strip() or "all"},
        pinned={"until": selection.until.isoformat()},
        nothing=count == 0,
        do=lambda: {"settled": settle(dry_run=False)},
    )


def pinned_selection(values: Values) -> tuple[LetterSelection, str]:
    """Return the dead letters that the values of an action select, and a description of the selection.

    Dead letters that arrive after the plan are not included.
    """
    selection = _selection(values)
    pinned = selection if selection.until is not None else replace(selection, until=_now())
    return pinned, _described(selection)


def _now() -> datetime:
    """The present time by the clock of the broker."""
    if (server := observer()) is not None:
        return server.now()
    [now] = on_broker(Executor.one, _NOW)
    assert isinstance(now, datetime)
    return now


def _selection(values: Values) -> LetterSelection:
    """The dead letters that the values describe.

    For all of them, the operator must pass `all`, so that a forgotten field does not select all.
    """
    names = ("error", "error_type", "topic", "key", "since", "until")
    parts = {"message_ids": list(values["ids"]) or None, **{name: values[name] for name in names}}
    narrowed = any(value is not None for name, value in parts.items() if name != "until")
    if (values["all"] and narrowed) or not (values["all"] or narrowed or parts["until"]):
        raise UsageError("name message ids, select by --error, --key …, or pass --all.")
    return LetterSelection(**parts)


def _described(selection: LetterSelection) -> str:
    if selection.message_ids is not None:
        return f" ({_some(selection.message_ids)})"
    given = {
        "whose error is of type": selection.error_type,
        "whose error contains": selection.error,
        "of topic": selection.topic,
        "with key": selection.key,
        "dead since": selection.since,
        "dead before": selection.until,
    }
    return "".join(f" {words} {value}" for words, value in given.items() if value is not None)


def _some(ids: Sequence[UUID]) -> str:
    return f"{', '.join(map(str, ids[:20]))}{' …' if len(ids) > 20 else ''}"


# -- recall ---------------------------------------------------------------------------------------------


def _recall_button(message_id: object, *, can_recall: bool = True) -> Sequence[Button]:
    return [Button("Recall …", "bad", {"ids": message_id})] if can_recall else []


@action(
    "recall",
    "Recall messages that wait for their delivery time or a retry",
    "outbox_message recall",
    _MESSAGES,
    Field("topic", "together with a key: all waiting messages of this topic and key"),
    Field("key", "together with a topic: all waiting messages of this topic and key"),
    buttons={
        "waiting": lambda one: _recall_button(one.message_id, can_recall=not one.claimed),
        "waiting selected": lambda _: [Button("Recall the selected ones …", "bad")],
        "search": lambda found: _recall_button(
            found[0].message_id, can_recall=found[1].retrying or found[1].is_delayed
        ),
        "message": lambda page: _recall_button(page["message"].message_id, can_recall=page["can_recall"]),
    },
)
def _recall(values: Values) -> ActionPlan:
    ids, topic, key = list(dict.fromkeys(values["ids"])), values["topic"], values["key"]
    by_key = topic is not None and key is not None
    if (topic is None) != (key is None) or bool(ids) == by_key:
        raise UsageError("name message ids, or give --topic and --key.")

    def outcomes(*, dry_run: bool) -> list[Recall]:
        with broker_executor() as run, run.connection.transaction(force_rollback=dry_run):
            if not by_key:
                return recall.recall(run, ids)
            TopicCatalog(run.schema).get(run.connection, topic)
            return recall.recall_key(run, topic, key)

    planned = outcomes(dry_run=True)
    if by_key and not planned:
        raise UsageError(f"no message of topic {topic!r} with key {key!r} waits for its delivery time or a retry.")
    count = sum(one.is_recalled for one in planned)
    left = [f"{one.message_id} is {one.status}" for one in planned if not one.is_recalled]
    return ActionPlan(
        subject=f"key {key} of topic {topic}" if by_key else f"messages {_some(ids)}",
        effect=f"Recall {counted(count, 'message')} before the delivery time or the next retry. No group then handles "
        f"{'it' if count == 1 else 'them'}.",
        caution="This cannot be undone." + (f" Not recalled: {'; '.join(left[:20])}." if left else ""),
        before=_counted(planned),
        nothing=count == 0,
        do=lambda: _counted(outcomes(dry_run=False)),
    )


def _counted(outcomes: Sequence[Recall]) -> Mapping[str, Any]:
    shown = {str(one.message_id): str(one.status) for one in outcomes[:_NOTED]}
    left = [f"{one.message_id} ({one.status})" for one in outcomes if not one.is_recalled]
    return (
        shown
        | {"messages": len(outcomes)}
        | ({"not_listed": len(outcomes) - _NOTED} if len(outcomes) > _NOTED else {})
        | ({LEFT: left[:_NOTED]} if left else {})
    )


# -- redeliver ------------------------------------------------------------------------------------------


def _redeliver_buttons(page: Mapping[str, Any]) -> Sequence[Button]:
    message_id = page["message"].message_id
    return [
        Button(f"Deliver again to {one} …", "bad", {"group": one, "id": message_id}) for one in page["passed_groups"]
    ]


@action(
    "redeliver",
    "Deliver a message again to a group that has passed it",
    "outbox_message redeliver",
    argument("id", "message id", FieldKind.ID),
    Field("group", "the consumer group that gets the message again", required=True),
    buttons={"message": _redeliver_buttons},
)
def _redeliver(values: Values) -> ActionPlan:
    message_id, group = values["id"], values["group"]
    forget = partial(_forget, group, message_id)

    def do() -> Mapping[str, Any]:
        rows = on_broker(changes.redeliver, group, message_id, forget=forget)
        get_broker().notify_decided()
        return {"delivered_again": 1, "inbox_rows_removed": rows}

    on_broker(changes.redeliver, group, message_id, dry_run=True)
    return ActionPlan(
        subject=f"messages {message_id}",
        effect=f"Deliver message {message_id} again to group {group}, and to no other group. The group handles it even "
        "if it is in the group's inbox.",
        caution="If the effect of the message exists, it happens a second time. Messages that the handler publishes "
        "are published a second time. The order of the message's key is not kept.",
        dangerous=True,
        do=do,
    )


def _forget(group: str, message_id: UUID) -> int:
    """Remove a message from the group's inboxes, and return the number of rows. Raises LedgerUnavailable."""
    from outbox.contrib.django.models import InboxEntry

    rows = 0
    for alias in ledger_aliases():
        if not router.allow_migrate_model(alias, InboxEntry):
            continue
        try:
            with closing(open_connection(alias)) as connection:
                if InboxEntry._meta.db_table in connection.introspection.table_names():
                    rows += handled.forget(connection, group, message_id)
        except DatabaseError as error:
            raise LedgerUnavailable(
                f"the inbox on {alias!r} cannot be read or written ({str(error).strip()}), so the message was not "
                "delivered again, because the inbox would skip it. Make the database reachable, and run this command "
                "again."
            ) from error
    return rows


# -- the lists ------------------------------------------------------------------------------------------


def selected(asked: Asked) -> LetterSelection:
    return LetterSelection(**asked.only(*(one.name for one in SELECTION)))


def _read_letters(run: Executor, asked: Asked) -> Sequence[DeadLetter]:
    if asked["group"]:
        group_now(run, asked["group"])
    return list_dead_letters(run, asked["group"], selected(asked), **asked.only("settled", "after"), limit=asked.limit)


def _letter_with_failures(one: DeadLetter) -> Mapping[str, Any]:
    return {"letter": one, "failures": on_broker(failed_attempts, one.group, one.message_id)}


def _given_up(one: DeadLetter) -> list[object]:
    if one.discarded_at:
        return [one.dead_at, badge("discarded")]
    return [one.dead_at, badge("replayed")] if one.replayed_at else [one.dead_at]


LETTERS: Final = Listing(
    "letters",
    (
        Column("Given up", _given_up),
        Column("Group", lambda one: group_link(one.group), when=lambda given: not given["group"]),
        Column("Topic", "topic"),
        Column("Key", lambda one: shortened(inert(one.key), 60), "key"),
        Column("Attempts", "attempts", "number"),
        Column("Last error", lambda one: error(one.error)),
        Column("Message", lambda one: message_link(one.message_id)),
    ),
    _read_letters,
    command="outbox_dead_letter list",
    help="list unsettled dead letters; with --json, also the error of every attempt",
    fields=(
        Field("group", "only dead letters of this group", positional=True),
        *SELECTION,
        Field(
            "settled",
            "also list dead letters that were replayed or discarded",
            FieldKind.FLAG,
            label="Settled ones too",
        ),
    ),
    after=Field(
        "after", "show the page after this position, which the end of the previous page shows", FieldKind.PLACE
    ),
    position=lambda one: one.place,
    json=_letter_with_failures,
    address="dead-letters/list/",
    title=lambda given: "Dead letters" + (f" of {given['group']}" if given["group"] else ""),
    tab="dead",
    tab_group="group",
    caption="Dead letters, newest first",
    empty="No dead letters match.",
    choice=Choice(
        "ids",
        lambda one: None if one.replayed_at or one.discarded_at else one.message_id,
        needs="group",
    ),
)


def _read_messages(run: Executor, asked: Asked) -> Sequence[FoundMessage]:
    if asked["key"] is None and asked["topic"] is None:
        raise UsageError("name a topic, or pass --key.")
    if asked["topic"] is not None:
        TopicCatalog(run.schema).get(run.connection, asked["topic"])
    # The list begins with the newest message, so the next page has older messages.
    page = {"before": asked["after"], "limit": asked.limit, "with_content": True}
    state = "committed" if asked["key"] is None and not asked["uncommitted"] else None
    found = find_messages(run, **asked.only("key", "topic", "since"), state=state, **page)
    masked = get_settings().masked_fields
    return [one.without(names) if (names := masked_names(masked, one.topic)) else one for one in found]


MESSAGES: Final = Listing(
    "messages",
    (
        Column("Log id", "log_id"),
        Column("Message", "message_id"),
        Column("Topic", "topic"),
        Column("Key", "key"),
        Column("Tag", "tag"),
        Column("Stored", "stored_at"),
        Column("State", "state"),
        Column("Body", lambda one: one.text()[:_SHOWN_CHARACTERS]),
    ),
    _read_messages,
    command="outbox_message list",
    help="list the messages of a topic, or with a key, newest first; moves no offset and locks nothing",
    fields=(
        Field("topic", "list the messages of this topic", positional=True),
        Field("key", "list the messages with this business key, in any state"),
        Field("uncommitted", "also list undecided, rolled back and recalled messages", FieldKind.FLAG),
        Field("since", "list messages stored after this time (default: one day ago)", FieldKind.TIME),
    ),
    after=Field("after", "list messages that were stored before the message with this log id", FieldKind.NUMBER),
    position=lambda one: one.log_id,
    json=FoundMessage.as_json,
)
