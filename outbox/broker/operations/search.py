"""Find stored messages by key, topic, time and state, also undecided ones; read a body and headers."""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from outbox.broker.database.arrays import bigints
from outbox.broker.database.executor import Executor, Row
from outbox.broker.database.statement import Statement
from outbox.broker.log.topics import find_topic_id
from outbox.utils.safe_text import MASK, masked_value


@dataclass(frozen=True, slots=True)
class FoundMessage:
    """A stored message. `state`: one of STATES. `body` is None if not asked for."""

    log_id: int
    message_id: UUID
    transaction_id: UUID
    topic: str
    key: str
    tag: str
    stored_at: datetime
    state: str
    deliver_at: datetime | None = None
    content_type: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None

    def text(self) -> str:
        """Return the body for display: the text if it is UTF-8, else base64 after `base64:`."""
        body = self.body or b""
        try:
            return body.decode()
        except UnicodeDecodeError:
            return "base64:" + base64.b64encode(body).decode()

    def without(self, names: Collection[str]) -> FoundMessage:
        """Return the message with *** as the value of each field in `names`. A body that is not JSON is left out."""
        try:
            body = json.dumps(masked_value(json.loads(self.body or b""), names), ensure_ascii=False)
        except (ValueError, RecursionError):
            body = MASK
        return replace(self, body=body.encode(), headers=masked_value(self.headers, names))

    def as_json(self) -> dict[str, Any]:
        """Return the fields as a dict; ids and times keep their Python types."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "body"} | {"body": self.text()}


# The state of a stored message.
STATE: Final = """CASE WHEN recalled.log_id IS NOT NULL THEN 'recalled' WHEN op.decision = 'C' THEN 'committed'
            WHEN op.decision = 'R' THEN 'rolled back' WHEN pending.parked_at IS NOT NULL THEN 'parked'
            ELSE 'undecided' END"""

STATES: Final = ("committed", "undecided", "parked", "rolled back", "recalled")

# Only searchable topics have an index by key, because it makes the storing of every message slower. With the index by
# time, PostgreSQL reads only the blocks of the table that have rows of the given time span. The topic is given by its
# number: PostgreSQL uses the index of a topic only if it knows the number when it plans.
_FOUND: Final = f"""
SELECT log.log_id, log.message_id, log.transaction_id, topic.name AS topic, log.key, log.tag, log.stored_at,
       {STATE} AS state<CONTENT>
FROM {{schema}}.commit_log log JOIN {{schema}}.topic USING (topic_id)
LEFT JOIN {{schema}}.op_log op USING (transaction_id)
LEFT JOIN {{schema}}.pending_check pending USING (transaction_id)
LEFT JOIN {{schema}}.recalled ON recalled.log_id = log.log_id
WHERE (%(key)s::text IS NULL OR log.key = %(key)s) AND (%(topic_id)s::integer IS NULL OR log.topic_id = %(topic_id)s)
  AND log.stored_at >= coalesce(%(since)s::timestamptz, now() - interval '1 day')
  AND (%(until)s::timestamptz IS NULL OR log.stored_at < %(until)s)
  AND (%(before)s::bigint IS NULL OR log.log_id < %(before)s)
  AND (%(state)s::text IS NULL OR {STATE} = %(state)s)
ORDER BY log.log_id DESC LIMIT %(limit)s
"""
_WITHOUT_CONTENT: Final = Statement(_FOUND.replace("<CONTENT>", ""))
_WITH_CONTENT: Final = Statement(
    _FOUND.replace(
        "<CONTENT>",
        ", log.deliver_at, log.content_type, coalesce(log.headers, '{{}}') AS headers, log.body",
    )
)


def find_messages(
    run: Executor,
    key: str | None = None,
    topic: str | None = None,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    before: int | None = None,
    state: str | None = None,
    limit: int = 100,
    with_content: bool = False,
) -> list[FoundMessage]:
    """Return a page of messages, the newest first. `with_content`: also their bodies and headers.

    They were stored at `since` (default: one day ago) or later, and before `until`. `before`: the last log id of the
    page before. With `key` and a searchable `topic`, an index of the keys is read. Otherwise all messages of the time
    span are read, which takes some seconds per ten million.
    """
    topic_id = None
    if topic is not None and (topic_id := find_topic_id(run, topic)) is None:
        return []
    values = {"key": key, "topic_id": topic_id, "since": since, "until": until, "before": before, "state": state}
    values["limit"] = limit
    # Not prepared, because PostgreSQL must know the length of the time span when it plans the statement.
    statement = _WITH_CONTENT if with_content else _WITHOUT_CONTENT
    return run.objects(FoundMessage, statement, values, prepare=False)


_UNFINISHED: Final = Statement("""
SELECT given.log_id,
       (SELECT count(*) FROM {schema}.consumer_group JOIN {schema}.dead_letter letter USING (group_id)
        WHERE letter.log_id = given.log_id AND letter.replayed_at IS NULL) AS dead,
       (SELECT count(*) FROM {schema}.scheduled
        WHERE scheduled.log_id = given.log_id AND queue_id IS NOT NULL AND NOT claimed) AS retrying,
       EXISTS (SELECT FROM {schema}.scheduled
               WHERE scheduled.log_id = given.log_id AND queue_id IS NULL) AS is_delayed
FROM unnest(%(log_ids)s::bigint[]) AS given (log_id)
""")


def unfinished_deliveries(run: Executor, log_ids: Sequence[int]) -> dict[int, Row]:
    """Return for each of these messages, by log id, which groups have not finished it after a failure.

    `dead` and `retrying`: in how many groups it is an unsettled dead letter, or waits for another attempt.
    `is_delayed`: whether it waits for its delivery time.
    """
    rows = run.objects(Row, _UNFINISHED, {"log_ids": bigints(log_ids)})
    return {row.log_id: row for row in rows}


# Apart, because only some operators may see body and headers.

_CONTENT: Final = Statement("""
SELECT topic.name AS topic, content_type, octet_length(body) AS size, body, headers
FROM {schema}.commit_log JOIN {schema}.topic USING (topic_id)
WHERE message_id = %(id)s
""")


def content_of(run: Executor, message_id: UUID) -> Row | None:
    """Return the topic, content_type, size (bytes), body and headers of a message; None if the broker lacks it."""
    return next(iter(run.objects(Row, _CONTENT, {"id": message_id})), None)
