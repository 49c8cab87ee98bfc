"""The limits of topics: how many messages a group may be behind.

The leader counts the lag of all groups every few seconds. `mark_topics` then compares it with the limits, and stores in
the row of a topic that its limit is exceeded. Publishers read this row with the topic, so publishing has no further
statement. A limit counts as exceeded until the value is below 90 % of it, so that a topic does not alternate between
the two states.

```
 within ──(80 %)──► near ──(over the limit)──► over ──(below 90 %)──► within or near
                              condition topic_limit
```

The leader marks the topic, because it counts the lags anyway, and a publisher cannot count a backlog in time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from outbox.broker.database.executor import Executor, Row
from outbox.broker.database.statement import Statement

# Shares of the limit: from the first one on, the condition `topic_limit` holds. Below the second one, an exceeded
# limit is over.
NEAR: Final = 0.8
ENDS_BELOW: Final = 0.9

# Topic, group, and the number of messages of the topic that the group has not handled yet.
Lags = Sequence[tuple[str, str, int]]

_LIMITED: Final = Statement("""
SELECT name AS topic, backlog_limit, on_limit, over_limit AS mark, {schema}.uncounted_messages() AS uncounted
FROM {schema}.topic
WHERE retry_of IS NULL AND deleted_at IS NULL AND (backlog_limit IS NOT NULL OR over_limit IS NOT NULL)
ORDER BY name
""")

_MARK: Final = Statement("UPDATE {schema}.topic SET over_limit = %(mark)s::text::jsonb WHERE name = %(topic)s")


@dataclass(frozen=True, slots=True)
class LimitUse:
    """How much of a topic's limit is used.

    `measure`: 'backlog' (messages that `group` is behind), or 'uncounted' (messages since the last count, if no process
    leads). `is_over`: the limit counts as exceeded.
    """

    topic: str
    measure: str
    group: str
    value: int
    limit: int
    on_limit: str
    is_over: bool

    @property
    def share(self) -> float:
        """The used share of the limit; above 1 if the limit is exceeded."""
        return self.value / self.limit

    @property
    def reason(self) -> str:
        """Which limit is exceeded, and what to do."""
        return (
            f"group {self.group!r} is more than the topic's backlog_limit of {self.limit} messages behind. Start or "
            "speed up the workers of this group. If the group is gone for good, delete it (docs/operations/sizing.md)"
        )


def limit_uses(run: Executor, lags: Lags) -> list[LimitUse]:
    """Return the most used limit of each topic that has limits. `lags`: the lag of each group on each topic."""
    return [max(found, key=lambda use: (use.is_over, use.share)) for _, found in _by_topic(run, lags) if found]


def mark_topics(run: Executor, lags: Lags) -> None:
    """Store in the rows of the topics whether their limits are exceeded."""
    for topic, found in _by_topic(run, lags):
        worst = max((use for use in found if use.is_over), key=lambda use: use.share, default=None)
        wanted = None if worst is None else {"measure": worst.measure, "group": worst.group, "limit": worst.limit}
        known = topic.mark and {name: topic.mark.get(name) for name in ("measure", "group", "limit")}
        if wanted != known:
            text = None if worst is None or wanted is None else json.dumps({**wanted, "reason": worst.reason})
            run.execute(_MARK, {"topic": topic.topic, "mark": text})


def _by_topic(run: Executor, lags: Lags) -> Iterator[tuple[Row, list[LimitUse]]]:
    for topic in run.objects(Row, _LIMITED):
        found = []
        if topic.backlog_limit is not None:
            if behind := [(messages, group) for name, group, messages in lags if name == topic.topic]:
                messages, group = max(behind)
                found.append(_use(topic, "backlog", group, messages))
            if topic.uncounted:
                found.append(_use(topic, "uncounted", "", topic.uncounted))
        yield topic, found


def _use(topic: Row, measure: str, group: str, value: int) -> LimitUse:
    was_over = topic.mark is not None and topic.mark.get("measure") == measure
    is_over = value > topic.backlog_limit or (was_over and value >= ENDS_BELOW * topic.backlog_limit)
    return LimitUse(topic.topic, measure, group, value, topic.backlog_limit, topic.on_limit, is_over)
