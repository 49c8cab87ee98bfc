"""The list of messages that wait for their time: delayed messages, and retries."""

from __future__ import annotations

from typing import Final

from outbox.broker.database.executor import Executor, Row
from outbox.broker.operations.dead_letters import PagePosition
from outbox.broker.operations.listings import list_waiting
from outbox.contrib.django.actions.cells import ago, error, group_link, inert, message_link, shortened
from outbox.contrib.django.actions.declaration import Field, FieldKind
from outbox.contrib.django.actions.listing import Asked, Choice, Column, Listing

# The titles of the page by the filters (delayed, retrying).
_TITLES: Final = {
    (False, False): "Messages that wait for their time",
    (True, False): "Delayed messages",
    (False, True): "Messages that are retried",
    (True, True): "Delayed messages",
}


def _read(run: Executor, asked: Asked) -> list[Row]:
    retrying = asked["retrying"] and not asked["delayed"]
    return list_waiting(run, **asked.only("group", "topic", "delayed", "after"), retrying=retrying, limit=asked.limit)


def _waits_for(one: Row) -> object:
    if one.group is None:
        return "its delivery time"
    what = "the handler, claimed by" if one.claimed else f"attempt {one.attempt + 1} of"
    return [what, group_link(one.group)]


WAITING: Final = Listing(
    "waiting",
    (
        Column("Due", lambda one: ago(one.due_at)),
        Column("Waits for", _waits_for),
        Column("Topic", "topic"),
        Column("Key", lambda one: shortened(inert(one.key), 60), "key"),
        Column("Last error", lambda one: error(one.error), when=lambda given: not given["delayed"]),
        Column("Message", lambda one: message_link(one.message_id)),
    ),
    _read,
    fields=(
        Field("group", "only messages of this group"),
        Field("topic", "only messages of this topic"),
        Field("delayed", "only messages with a delivery time", FieldKind.FLAG, by_tab=True),
        Field("retrying", "only retries", FieldKind.FLAG, by_tab=True),
    ),
    after=Field("after", "the messages after this position", FieldKind.PLACE),
    position=lambda one: PagePosition(one.due_at, one.schedule_id),
    address="waiting/",
    title=lambda given: _TITLES[given["delayed"], given["retrying"]],
    tab=lambda given: "delayed" if given["delayed"] else "retrying" if given["retrying"] else "waiting",
    tab_group="group",
    caption="Waiting messages, the next due first",
    empty="No messages are waiting.",
    choice=Choice("ids", lambda one: one.message_id),
)
