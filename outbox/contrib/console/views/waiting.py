"""The list of messages that wait for their time: delayed messages, and retries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from outbox.broker.database.executor import Executor, Row
from outbox.broker.database.statement import Statement
from outbox.broker.operations import summary
from outbox.broker.operations.dead_letters import PagePosition
from outbox.contrib.django.actions.cells import ago, error, group_link, inert, message_link, shortened
from outbox.contrib.django.actions.declaration import Field, FieldKind
from outbox.contrib.django.actions.listing import Asked, Choice, Column, Listing

_DUE: Final = Statement("""
SELECT scheduled.schedule_id, scheduled.due_at, scheduled.attempt, scheduled.claimed, log.message_id,
       topic.name AS topic, log.key, consumer_group.name AS group,
       (SELECT error FROM {schema}.failure
        WHERE failure.group_id = consumer_group.group_id AND failure.log_id = scheduled.log_id
        ORDER BY failure.attempt DESC LIMIT 1) AS error
FROM {schema}.scheduled JOIN {schema}.commit_log log USING (log_id) JOIN {schema}.topic ON topic.topic_id = log.topic_id
LEFT JOIN {schema}.queue ON queue.queue_id = scheduled.queue_id
LEFT JOIN {schema}.topic retries ON retries.topic_id = queue.topic_id
LEFT JOIN {schema}.consumer_group ON consumer_group.group_id = retries.retry_of
WHERE (%(group)s::text IS NULL OR consumer_group.name = %(group)s)
  AND (%(topic)s::text IS NULL OR topic.name = %(topic)s)
  AND (NOT %(delayed)s::boolean OR scheduled.queue_id IS NULL)
  AND (NOT %(retrying)s::boolean OR scheduled.queue_id IS NOT NULL)
  AND (%(after_at)s::timestamptz IS NULL
       OR (scheduled.due_at, scheduled.schedule_id) > (%(after_at)s::timestamptz, %(after_id)s::bigint))
ORDER BY scheduled.due_at, scheduled.schedule_id LIMIT %(limit)s
""")

# The titles of the page by the filters (delayed, retrying).
_TITLES: Final = {
    (False, False): "Messages that wait for their time",
    (True, False): "Delayed messages",
    (False, True): "Messages that are retried",
    (True, True): "Delayed messages",
}


def _read(run: Executor, asked: Asked) -> list[Row]:
    """Return a page of scheduled messages, the message that is due next first.

    A message waits for its delivery time (`group` is None) or for the next attempt of a group, whose last error is
    `error`. If it is `claimed`, its handler runs now, and it is delivered again at `due_at` if the process dies.
    """
    after_at, after_id = asked["after"] or (None, None)
    retrying = asked["retrying"] and not asked["delayed"]
    place = {"retrying": retrying, "after_at": after_at, "after_id": after_id, "limit": asked.limit}
    return run.objects(Row, _DUE, {**asked.only("group", "topic", "delayed"), **place})


def _queued(run: Executor, asked: Asked, rows: Sequence[object]) -> Mapping[str, object]:
    """The retries that are due, by group: the counts of retries include them, and this list does not."""
    counted = summary.stored(run) if not asked["delayed"] else None
    retries = [one for one in counted.groups if one.is_retry and one.lag] if counted else []
    return {"queued": [one for one in retries if asked["group"] in (None, one.group)]}


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
    empty="No messages are waiting for their time.",
    notes=_queued,
    template="waiting",
    choice=Choice("ids", lambda one: one.message_id),
)
