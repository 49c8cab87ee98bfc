"""The picture of a message's page: the messages of its transaction, and what their handlers published in turn.

A message names its cause in a header (outbox/contrib/console/followers). No index has it, because it would make the
storing of every message slower. A follower is stored after its cause, so the primary key leads to a bounded part of the
log in which all followers of a transaction are found at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from django.apps import apps

from outbox.broker.database.executor import Executor, Row
from outbox.broker.database.statement import Statement
from outbox.broker.operations.search import STATE
from outbox.broker.operations.trace import EntryState, Trace, traced_entries
from outbox.contrib.console.asking import as_uuid
from outbox.contrib.console.followers.cause import HEADER

# So many messages are searched, those after the first one of the transaction.
SEARCHED: Final = 50_000
LEVELS: Final = 5
MOST: Final = 50

# The colour of a group's state.
TONES: Final = {
    EntryState.HANDLED: "good",
    EntryState.PASSED: "good",
    EntryState.DEAD: "bad",
    EntryState.EXPIRED: "bad",
    EntryState.TIMED_OUT: "warn",
    EntryState.CLAIMED: "plain",
    EntryState.SENT_BACK: "warn",
    EntryState.LEFT: "warn",
    EntryState.RECALLED: "plain",
    EntryState.WAITING: "warn",
}

# Followers of messages, with the number of all of them as `total`. `cause`: the id of the message whose handler
# published it; `by_group`: its group. A follower comes after its cause, so headers that name each other make no circle.
_FOLLOWERS: Final = Statement(f"""
WITH RECURSIVE candidate AS MATERIALIZED (
    SELECT log_id, message_id::text AS message_id, left(headers ->> '{HEADER}', 36) AS cause,
           substr(headers ->> '{HEADER}', 38, 127) AS by_group
    FROM {{schema}}.commit_log
    WHERE log_id > %(first)s AND log_id <= %(last)s AND headers ->> '{HEADER}' IS NOT NULL
), follower AS (
    SELECT *, 1 AS level FROM candidate WHERE cause = ANY (%(ids)s::text[])
    UNION ALL
    SELECT candidate.*, level + 1
    FROM follower JOIN candidate ON candidate.cause = follower.message_id AND candidate.log_id > follower.log_id
    WHERE level < %(levels)s
), shown AS (
    SELECT *, count(*) OVER () AS total FROM follower ORDER BY level, log_id LIMIT %(most)s
)
SELECT log.log_id, log.message_id::text AS message_id, shown.cause, by_group.name AS by_group, shown.total,
       topic.name AS topic, log.key, {STATE} AS state
FROM shown
JOIN {{schema}}.commit_log log USING (log_id)
JOIN {{schema}}.topic USING (topic_id)
LEFT JOIN {{schema}}.consumer_group by_group ON by_group.name = shown.by_group
LEFT JOIN {{schema}}.op_log op USING (transaction_id)
LEFT JOIN {{schema}}.pending_check pending USING (transaction_id)
LEFT JOIN {{schema}}.recalled ON recalled.log_id = log.log_id
ORDER BY shown.level, log.log_id
""")

_CAUSE: Final = Statement(f"SELECT left(headers ->> '{HEADER}', 36) FROM {{schema}}.commit_log WHERE log_id = %(id)s")


@dataclass(frozen=True, slots=True)
class Node:
    """One message of the picture. `states`: the state of each group as text with its tone, or that of the message."""

    message_id: str
    topic: str
    key: str
    by_group: str | None
    states: Sequence[tuple[str, str]]
    followers: Sequence[Node]


@dataclass(frozen=True, slots=True)
class Picture:
    """The messages of a transaction with their followers. `more`: how many followers are left out."""

    cause: UUID | None
    nodes: Sequence[Node]
    has_followers: bool
    more: int
    searched: int = SEARCHED
    levels: int = LEVELS
    is_recording: bool = True


def picture(run: Executor, found: Trace, one: Row) -> Picture:
    """The picture of a transaction, on the page of one of its messages. It takes a few statements of bounded work."""
    at = found.messages.index(one)
    roots = found.messages[:MOST] if at < MOST else [one, *found.messages[: MOST - 1]]
    first = min(root.log_id for root in roots)
    given = {"first": first, "last": first + SEARCHED, "ids": [root.message_id for root in roots]}
    followers = run.objects(Row, _FOLLOWERS, {**given, "levels": LEVELS, "most": MOST}, prepare=False)
    total = len(found.messages) + (followers[0].total if followers else 0)
    entries = list(found.entries)
    if followers:
        entries += traced_entries(run, [follower.log_id for follower in followers])
    states: dict[int, dict[str, EntryState]] = {}
    for entry in entries:
        if entry.group:
            # The newest entry of a group comes last.
            states.setdefault(entry.log_id, {})[entry.group] = entry.state
    children: dict[str, list[Row]] = {}
    for follower in followers:
        children.setdefault(follower.cause, []).append(follower)

    def node(message: Row, by_group: str | None, state: str) -> Node:
        groups = sorted(states.get(message.log_id, {}).items())
        shown = [(f"{group}: {of_group}", TONES.get(of_group, "plain")) for group, of_group in groups]
        below = [node(child, child.by_group, child.state) for child in children.get(message.message_id, ())]
        told = shown or ([(state, "plain")] if state else [])
        return Node(message.message_id, message.topic, message.key, by_group, told, below)

    [(cause,)] = run.rows(_CAUSE, {"id": one.log_id})
    return Picture(
        cause=as_uuid(cause) if cause else None,
        nodes=[node(root, None, "") for root in roots],
        has_followers=bool(followers),
        more=total - len(roots) - len(followers),
        is_recording=apps.is_installed("outbox.contrib.console.followers"),
    )
