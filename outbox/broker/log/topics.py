"""Declare topics, and find declared topics by name when messages are sent."""

from __future__ import annotations

import difflib
import itertools
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from outbox.broker.database.connection import Connection
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.errors import TopicOverLimit, UnknownTopic
from outbox.message import Message
from outbox.topic import MessageType, Topic, select_shard
from outbox.utils import log_context

logger = logging.getLogger(__name__)

_REFRESH_SECONDS: Final = 30.0
# While a limit of a topic is exceeded, its publishers read the topics again after this many seconds.
_RECHECK_SECONDS: Final = 1.0

_DECLARE = Statement("""
INSERT INTO {schema}.topic AS known (name, message_types, queue_count, key_lock, on_park, retention_seconds,
    backlog_limit, on_limit, searchable)
VALUES (%(name)s, %(types)s, %(queue_count)s, %(key_lock)s, %(on_park)s, %(retention_seconds)s,
    %(backlog_limit)s, %(on_limit)s, %(searchable)s)
ON CONFLICT (name) DO UPDATE SET
    message_types = excluded.message_types, key_lock = excluded.key_lock, on_park = excluded.on_park,
    retention_seconds = excluded.retention_seconds, queue_count = excluded.queue_count,
    backlog_limit = excluded.backlog_limit,
    on_limit = excluded.on_limit, searchable = excluded.searchable,
    layout = known.layout + (known.queue_count <> excluded.queue_count)::integer, deleted_at = NULL
WHERE known.deleted_at IS NOT NULL
   OR (known.message_types, known.key_lock, known.on_park, known.retention_seconds, known.queue_count,
       known.backlog_limit, known.on_limit, known.searchable)
   IS DISTINCT FROM
      (excluded.message_types, excluded.key_lock, excluded.on_park, excluded.retention_seconds, excluded.queue_count,
       excluded.backlog_limit, excluded.on_limit, excluded.searchable)
RETURNING topic_id, layout, queue_count
""")

_ADD_QUEUES = Statement("""
INSERT INTO {schema}.queue (topic_id, layout, number)
SELECT %(topic_id)s, %(layout)s, number FROM generate_series(0, %(queue_count)s - 1) AS number
ON CONFLICT DO NOTHING
""")

_CLOSE_OLDER_QUEUES = Statement("""
UPDATE {schema}.queue SET closing = true
WHERE topic_id = %(topic_id)s AND layout < %(layout)s AND closed_at IS NULL
""")

# Every declared topic, a row for `known_topic` each.
ALL_TOPICS: Final = Statement("""
SELECT topic_id, name, message_types, queue_count, key_lock, on_park, retention_seconds, backlog_limit,
       on_limit, searchable, over_limit ->> 'reason' AS over_limit,
       CASE WHEN backlog_limit IS NOT NULL THEN {schema}.uncounted_messages() END AS uncounted
FROM {schema}.topic WHERE retry_of IS NULL AND deleted_at IS NULL
""")


_ORDINARY_TYPES: Final = frozenset({MessageType.NORMAL, MessageType.TRANSACTION})


@dataclass(frozen=True, slots=True)
class KnownTopic:
    """A topic as the broker stores it."""

    topic_id: int
    topic: Topic
    # Which limit of the topic is exceeded, and the remedy; None if none is.
    over_limit: str | None = None
    # Whether the local transaction locks the keys of the topic's messages.
    locks_keys: bool = field(init=False)
    # Whether an ordinary message (without delivery time and headers) of a transaction is accepted without a look at it.
    takes_ordinary: bool = field(init=False)

    def __post_init__(self) -> None:
        types, is_fifo = self.topic.types, self.topic.is_fifo
        takes_ordinary = self.over_limit is None and not is_fifo and types >= _ORDINARY_TYPES
        object.__setattr__(self, "locks_keys", is_fifo and self.topic.key_lock)
        object.__setattr__(self, "takes_ordinary", takes_ordinary)


def known_topic(
    *, topic_id: int, message_types: list[str], over_limit: str | None, uncounted: int | None, **columns: Any
) -> KnownTopic:
    """Return the topic of a row of `ALL_TOPICS`."""
    topic = Topic(types=frozenset(map(MessageType, message_types)), **columns)
    if over_limit is None and (uncounted or 0) > (topic.backlog_limit or 0):
        over_limit = (
            f"no process leads, and {uncounted} messages were stored since the backlog was last counted "
            f"(the limit is {topic.backlog_limit}). Start a worker"
        )
    return KnownTopic(topic_id, topic, over_limit)


class Prepared(NamedTuple):
    """A message that its topic accepts, with the values that the log stores in addition to the message."""

    message: Message
    known: KnownTopic
    shard: int | None


def declare_topics(run: Executor, topics: Sequence[Topic]) -> None:
    """Create topics, and change existing or deleted topics to match their declaration; idempotent, in one transaction.

    A changed queue count starts a new layout of queues. Consumer groups consume the older queues to their ends before
    the queues of the new layout.
    """
    with run.connection.transaction():
        for topic in sorted(topics, key=lambda topic: topic.name):
            row = run.row(_DECLARE, _columns(topic))
            if row is not None:
                queues = dict(zip(("topic_id", "layout", "queue_count"), row, strict=True))
                run.execute(_ADD_QUEUES, queues)
                run.execute(_CLOSE_OLDER_QUEUES, queues)


def _columns(topic: Topic) -> dict[str, object]:
    return {
        "name": topic.name,
        "types": sorted(topic.types),
        "queue_count": topic.queue_count,
        "key_lock": topic.key_lock,
        "on_park": topic.on_park,
        "retention_seconds": topic.retention_seconds,
        "backlog_limit": topic.backlog_limit,
        "on_limit": topic.on_limit,
        "searchable": topic.searchable,
    }


def list_topics(run: Executor) -> list[Topic]:
    """Return every topic except the retry topics of consumer groups, by name."""
    return [known.topic for _, known in sorted(_read(run).items())]


def _read(run: Executor) -> dict[str, KnownTopic]:
    found = [known_topic(**row) for row in run.objects(dict, ALL_TOPICS)]
    return {known.topic.name: known for known in found}


_ID: Final = Statement("SELECT topic_id FROM {schema}.topic WHERE name = %(name)s")


def find_topic_id(run: Executor, name: str) -> int | None:
    """Return the id of the topic, also of a deleted one; None if the broker has never had it."""
    row = run.row(_ID, {"name": name})
    return None if row is None else int(row[0])


class TopicCatalog:
    """The declared topics. The catalog reads the topics at its first use, then every 30 s, and for each unknown name.

    Thread-safe.
    """

    def __init__(self, schema: str = "outbox") -> None:
        self._schema = schema
        self._known: dict[str, KnownTopic] = {}
        self._stale_at = 0.0
        self._warned: dict[str, float] = {}

    def get(self, connection: Connection, name: str) -> KnownTopic:
        """Return the topic `name`.

        If the topic is not declared, raises UnknownTopic, whose text has the most similar names.
        """
        known = self._known.get(name)
        if known is not None and time.monotonic() < self._stale_at:
            return known
        topics = self._refresh(connection)
        try:
            return topics[name]
        except KeyError:
            raise unknown_topic(name, topics) from None

    def remembered(self, name: str) -> KnownTopic | None:
        """Return the topic as it was read last, at most about 30 s before the last message; None if it was not read."""
        return self._known.get(name)

    def prepare(
        self, connection: Connection, messages: Sequence[Message], *, transactional: bool | None
    ) -> list[Prepared]:
        """Check messages against their topics (see Topic.check_accepts) and add topic ids and shards.

        Raises UnknownTopic, MessageTypeMismatch, InvalidMessage or TopicOverLimit.
        """
        if len(messages) == 1:
            message = messages[0]
            known = self._known.get(message.topic)
            if (
                known is not None
                and known.takes_ordinary
                and transactional
                and message.deliver_at is None
                and message.delay is None
                and not message.headers
                and time.monotonic() < self._stale_at
            ):
                return [Prepared(message, known, select_shard(message))]
            return self._prepare(connection, messages, transactional)
        prepared: list[Prepared] = []
        for _, of_topic in itertools.groupby(messages, key=lambda message: message.topic):
            prepared += self._prepare(connection, list(of_topic), transactional)
        return prepared

    def _prepare(
        self, connection: Connection, messages: Sequence[Message], transactional: bool | None
    ) -> list[Prepared]:
        """Do the same as `prepare` for messages of one topic."""
        name = messages[0].topic
        known = self.get(connection, name)
        known.topic.check_accepts_all(messages, transactional=transactional)
        # `transactional` is None if the local transaction has committed: the message must not be lost.
        if known.over_limit is not None and transactional is not None:
            self._check_limit(connection, messages[0])
        return [Prepared(message, known, select_shard(message)) for message in messages]

    def _check_limit(self, connection: Connection, message: Message) -> None:
        """Raise TopicOverLimit, or log a warning, if a limit of the message's topic is still exceeded.

        A handler is not refused: it works off a backlog, and if it had to wait for another group, two groups could
        wait for each other.
        """
        if log_context.is_handling():
            return
        name, now = message.topic, time.monotonic()
        if now > self._stale_at - _REFRESH_SECONDS + _RECHECK_SECONDS:
            self._refresh(connection)
        known = self.get(connection, name)
        if known.over_limit is None:
            return
        if known.topic.on_limit == "refuse":
            raise TopicOverLimit(
                f"topic {name!r} takes no messages now: {known.over_limit}. Message {message.message_id} was not "
                f"published. To accept more messages, raise the limit in OUTBOX['TOPICS'], and run `manage.py "
                "outbox_install`."
            )
        if now - self._warned.get(name, -_REFRESH_SECONDS) >= _REFRESH_SECONDS:
            self._warned[name] = now
            logger.warning("topic %r is over its limit, and still takes messages: %s", name, known.over_limit)

    def _refresh(self, connection: Connection) -> dict[str, KnownTopic]:
        topics = _read(Executor(connection, self._schema))
        self._known = topics
        self._stale_at = time.monotonic() + _REFRESH_SECONDS
        return topics


def unknown_topic(name: str, topics: Iterable[str]) -> UnknownTopic:
    """Return the error for a topic that is not declared. It names the most similar of the declared `topics`."""
    nearest = difflib.get_close_matches(name, list(topics), n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(map(repr, nearest))}?" if nearest else ""
    return UnknownTopic(
        f"topic {name!r} is not declared.{hint} Declare it in OUTBOX['TOPICS'], and run `manage.py migrate "
        "--database=ALIAS` with the alias of the broker; or call PostgresBroker.declare."
    )
