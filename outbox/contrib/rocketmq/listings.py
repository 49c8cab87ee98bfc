"""The lists of the commands and pages on RocketMQ, whose figures differ from those of the broker in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from outbox.broker.operations.dead_letters import DeadLetter
from outbox.contrib.django.actions import groups, messages, topics, transactions
from outbox.contrib.django.actions.listing import Asked, Column
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.rocketmq import operations
from outbox.errors import UsageError
from outbox.rocketmq import inspection
from outbox.rocketmq.inspection import Copy

_HERE: Final[Any] = {"engine": "rocketmq", "of_broker": False}


def _named(names: str) -> list[Column]:
    return [Column(name.replace("_", " "), name) for name in names.split()]


TOPICS: Final = replace(
    topics.LISTED,
    columns=_named("topic queues stored written"),
    read=lambda run, asked: inspection.topic_figures(operations.brokers(), sorted(get_settings().topics)),
    json=None,
    **_HERE,
)
GROUPS: Final = replace(
    groups.LISTED,
    columns=_named("group topic lag retrying oldest_at is_known"),
    read=lambda run, asked: inspection.group_figures(operations.brokers(), operations.pairs()),
    **_HERE,
)
QUEUES: Final = replace(
    groups.QUEUES,
    columns=_named("broker topic queue offset end lag"),
    read=lambda run, asked: inspection.offsets(
        operations.brokers(), asked["group"], operations.topics_of(asked["group"])
    ),
    **_HERE,
)


def _letters(run: None, asked: Asked) -> list[DeadLetter]:
    page = asked.only("settled", "after")
    return operations.list_letters(asked["group"], messages.selected(asked), **page, limit=asked.limit)


# RocketMQ's consumers note the error of the last attempt only.
LETTERS: Final = replace(
    messages.LETTERS, read=_letters, json=lambda one: {"letter": one, "failures": []}, tab="", **_HERE
)


def _open(run: None, asked: Asked) -> list[dict[str, Any]]:
    if asked["transactional_id"] or asked["parked"] or asked["after"]:
        raise UsageError(
            "RocketMQ has no transactional ids and no parked transactions, and the list has one page: leave these "
            "options out."
        )
    return [one.as_json() for one in operations.open_transactions(asked["group"])][: asked.limit]


OPEN: Final = replace(
    transactions.OPEN,
    columns=_named("transaction_id producer_group message_id topic key sent_at checks state broker ledger"),
    read=_open,
    position=None,
    json=None,
    **_HERE,
)


def _messages(run: None, asked: Asked) -> Sequence[Copy]:
    if lacking := [f"--{name}" for name in ("uncommitted", "since", "after") if asked[name]]:
        raise UsageError(
            f"RocketMQ does not list messages by {', '.join(lacking)}: leave it out. `outbox_transaction list` shows "
            "uncommitted messages."
        )
    if asked["key"] is not None:
        return operations.messages_with_key(asked["key"], asked["topic"])[-asked.limit :][::-1]
    if asked["topic"] is None:
        raise UsageError("name a topic, or pass --key.")
    return inspection.newest(operations.brokers(), asked["topic"], asked.limit)


MESSAGES: Final = replace(
    messages.MESSAGES,
    columns=(
        Column("message", lambda one: one.message.message_id),
        Column("topic", lambda one: one.message.topic),
        Column("key", lambda one: one.message.key),
        Column("tag", lambda one: one.message.tag),
        Column("stored", "stored_at"),
        *_named("place broker queue offset"),
    ),
    read=_messages,
    position=None,
    json=lambda one: operations.MessagePath(copies=[one], ledger={}, handled=[], letters=[]).sections()["copies"][0],
    **_HERE,
)
