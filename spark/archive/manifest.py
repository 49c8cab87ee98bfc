"""What an archive holds and how it is read: passes with their counts and checksums, and gaps."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Final

from ..errors import UsageProblem
from ..output.store import Store
from ..sources import sql
from ..sources.base import Column, ColumnKind, TableSelection
from ..sources.postgres import PostgresSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MANIFEST: Final = "archive.json"
FOLDER: Final = "message_v1"
KINDS: Final = {
    "log_id": ColumnKind.BIGINT,
    **dict.fromkeys(("message_id", "transaction_id", "topic", "key", "tag", "content_type"), ColumnKind.TEXT),
    "headers": ColumnKind.TEXT,
    "body": ColumnKind.BINARY,
    "stored_at": ColumnKind.TIMESTAMP,
    "deliver_at": ColumnKind.TIMESTAMP,
    "state": ColumnKind.TEXT,
    "decided_by": ColumnKind.TEXT,
    "decided_at": ColumnKind.TIMESTAMP,
    "recalled_at": ColumnKind.TIMESTAMP,
}
# From this time on neither state nor fate of a message can change: it can be recalled until it is due.
SETTLED: Final = "coalesce(recalled_at, greatest(decided_at, deliver_at))"
# Messages that retention has removed, and those still there that earlier passes took.
_REMOVED: Final = """
SELECT topic.topic, coalesce(removed.count, 0), coalesce(taken.count, 0),
       topic.pruned_at - topic.retention_seconds * interval '1 s'
FROM {topics} topic
LEFT JOIN (SELECT t.name AS topic, sum(p.committed) AS count FROM {pruned} p JOIN {names} t USING (topic_id)
           GROUP BY t.name) removed USING (topic)
LEFT JOIN (SELECT topic, count(*) AS count FROM {messages} WHERE {before} GROUP BY topic) taken USING (topic)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """Messages settled before `until` and not before `since` (None: all): how many, per topic, and their checksum."""

    name: str
    since: str | None
    until: str
    count: int
    checksum: int
    topics: dict[str, int]

    @property
    def folder(self) -> str:
        """Below the archive."""
        return f"{FOLDER}/pass={self.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """Messages of a topic that were removed before a pass could take them; found by the pass that ended at `until`."""

    topic: str
    messages: int
    until: str


@dataclass(kw_only=True)
class Manifest:
    """`removed`: per topic, how many messages were gone when the archive began, and up to when ('': none was)."""

    broker: str
    passes: list[Pass] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    removed: dict[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def until(self) -> str | None:
        """Up to when the newest pass took what was settled."""
        return self.passes[-1].until if self.passes else None

    def missing(self, topic: str, removed: int, taken: int) -> int:
        """How many of the removed messages are neither here nor known to be missing. `taken`: here and still there."""
        archived = sum(each.topics.get(topic, 0) for each in self.passes)
        known = sum(gap.messages for gap in self.gaps if gap.topic == topic)
        return removed - self.removed.get(topic, (0, ""))[0] - (archived - taken) - known

    def complete_from(self, topic: str) -> datetime | None:
        """Messages of the topic stored before may be in neither place; None: all are in one."""
        gaps = [gap.until for gap in self.gaps if gap.topic == topic]
        edge = gaps[-1] if gaps else self.removed.get(topic, (0, ""))[1]
        return datetime.fromisoformat(edge) if edge else None


def load(store: Store) -> Manifest | None:
    """What the archive holds; None before its first pass. Raises UsageProblem when the file is damaged."""
    text = store.read(MANIFEST)
    if text is None:
        return None
    try:
        known = json.loads(text)
        return Manifest(
            broker=known["broker"],
            passes=[Pass(**each) for each in known["passes"]],
            gaps=[Gap(**each) for each in known["gaps"]],
            removed={topic: (int(count), str(edge)) for topic, (count, edge) in known["removed"].items()},
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UsageProblem(
            f"{store.path(MANIFEST)} is damaged: {error!r}. Restore it, or begin a new archive."
        ) from None


def removed_by_topic(
    source: PostgresSource, schema: str, until: str | None
) -> list[tuple[str, int, int, datetime | None]]:
    """Per topic: messages that retention has removed, those still there that were settled before `until`, horizon."""
    names = {"topics": "topic_v1", "pruned": "pruned", "names": "topic", "messages": FOLDER}
    tables = {key: sql.table_name(name, schema) for key, name in names.items()}
    before = "false" if until is None else f"{SETTLED} < '{until}' AND state IN ('committed', 'recalled')"
    about = "the broker's totals of removed messages (the archive needs SELECT on its tables pruned and topic)"
    rows = source.query(_REMOVED.format(before=before, **tables), about=about)
    return [(str(topic), int(removed), int(taken), horizon) for topic, removed, taken, horizon in rows]


def read(spark: SparkSession, folders: list[str]) -> DataFrame:
    """The messages of these folders, `pass` and `day` included."""
    reader = spark.read.option("basePath", folders[0].rpartition("/")[0])
    return reader.schema(selection().schema.add("day", "date")).parquet(*folders)


def selection(*conditions: str) -> TableSelection:
    """The messages that satisfy the conditions, with all that the archive keeps of them."""
    columns = tuple(Column(name, name, kind) for name, kind in KINDS.items())
    return TableSelection(
        table=FOLDER, columns=columns, key="key", conditions=conditions, span="log_id", in_broker=True
    )
