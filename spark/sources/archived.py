"""A broker with an archive: if retention has removed messages from the log, a source reads them from the archive.

`outbox-reconcile archive` (`archive.py`) writes the archive: passes with their counts and checksums, and gaps.

A pass also copies the state of the log at its end (undecided, parked, waiting and dead messages). Without it, a run
over the archive alone would report a row with a parked message as LOST.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import reduce
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from ..common.errors import RunIncomplete, TableMissing, UsageProblem
from ..common.store import Store
from ..rules.rule import DatabaseRule, SourceKind
from . import adbc, contract, sql
from .base import Column, ColumnKind, SourceBoundary, TableSelection
from .files import FrameSource
from .postgres import PostgresSource

MANIFEST: Final = "archive.json"
FOLDER: Final = "message_v1"
TIMED_OUT: Final = "timed_out_v1"
DEAD: Final = "dead_letter_v1"
# The state of the log at the end of the newest pass: what no pass has, because it is not settled yet.
STATE: Final = "state"
# The time at which a message is settled. Before this time, a client may recall the message. After this time, its state
# cannot change, unless the message is not in its queue yet, because no leader runs. So a pass ends before the delivery
# time of the oldest such message.
SETTLED: Final = "coalesce(recalled_at, greatest(decided_at, deliver_at))"
# Per topic: the number of messages that retention has removed, the number of messages in the log that earlier passes
# copied, and the time before which retention may have removed messages.
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
    """One pass of `outbox-reconcile archive`: it copied the messages that were settled from `since` (None: the
    beginning) up to `until`."""

    name: str
    since: str | None
    until: str
    count: int
    checksum: int
    topics: dict[str, int]

    @property
    def folder(self) -> str:
        """The path of the pass's folder inside the archive's folder."""
        return f"{FOLDER}/pass={self.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """The number of messages of a topic that retention removed before a pass could copy them. `until` is the end of the
    pass that found the gap. A negative number is no gap: a restored log lacks messages that the archive has."""

    topic: str
    messages: int
    until: str


@dataclass(kw_only=True)
class Manifest:
    """The contents of `archive.json`: passes and gaps.

    For each topic, `removed` has the number of messages that retention had removed before the first pass, and the time
    before which these messages were stored ('' if the number is 0).
    """

    broker: str
    state: str = ""
    """The name of the pass whose folder in STATE has the messages that are not settled, and the dead letters."""
    passes: list[Pass] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    removed: dict[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def until(self) -> str | None:
        """The end of the newest pass, which copied the messages that were settled before this time; None if there is no
        pass."""
        return self.passes[-1].until if self.passes else None

    def missing(self, topic: str, removed: int, taken: int) -> int:
        """The number of removed messages that are neither in the archive nor in a known gap.

        `removed` is the number of messages that retention has removed from the log. `taken` is the number of messages
        that are both in the archive and in the log.
        """
        archived = sum(each.topics.get(topic, 0) for each in self.passes)
        known = sum(gap.messages for gap in self.gaps if gap.topic == topic)
        return removed - self.removed.get(topic, (0, ""))[0] - (archived - taken) - known

    def complete_from(self, topic: str) -> datetime | None:
        """The time from which on every message of the topic is in the archive or in the log; None: from the beginning.

        An older message may be neither in the archive nor in the log.
        """
        gaps = [gap.until for gap in self.gaps if gap.topic == topic and gap.messages > 0]
        edge = gaps[-1] if gaps else self.removed.get(topic, (0, ""))[1]
        return datetime.fromisoformat(edge) if edge else None


def load_manifest(store: Store) -> Manifest | None:
    """The manifest of the archive; None before the first pass. Raises UsageProblem if the file `archive.json` is
    damaged."""
    text = store.read(MANIFEST)
    if text is None:
        return None
    try:
        known = json.loads(text)
        return Manifest(
            broker=known["broker"],
            state=known.get("state", ""),
            passes=[Pass(**each) for each in known["passes"]],
            gaps=[Gap(**each) for each in known["gaps"]],
            removed={topic: (int(count), str(edge)) for topic, (count, edge) in known["removed"].items()},
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UsageProblem(
            f"{store.path(MANIFEST)} is damaged: {error!r}. Restore the file, or begin a new archive."
        ) from None


def removed_by_topic(
    source: PostgresSource, schema: str, until: str | None
) -> list[tuple[str, int, int, datetime | None]]:
    """For each topic: its name, the number of messages that retention has removed, the number of messages in the log
    that were settled before `until`, and the time before which retention may have removed messages."""
    names = {"topics": "topic_v1", "pruned": "pruned", "names": "topic", "messages": FOLDER}
    tables = {key: sql.table_name(name, schema) for key, name in names.items()}
    before = "false" if until is None else f"{SETTLED} < '{until}' AND state IN ('committed', 'recalled')"
    about = "the broker's totals of removed messages (the archive needs SELECT on its tables pruned and topic)"
    rows = source.query(_REMOVED.format(before=before, **tables), about=about)
    return [(str(topic), int(removed), int(taken), horizon) for topic, removed, taken, horizon in rows]


def columns_of(view: str) -> TableSelection:
    """All columns of a view of the broker, under their own names."""
    kinds = {"bigint": ColumnKind.BIGINT, "bytea": ColumnKind.BINARY, "timestamp with time zone": ColumnKind.TIMESTAMP}
    columns = [Column(name, name, kinds.get(kind, ColumnKind.TEXT)) for name, kind in contract.VIEWS[view].items()]
    return TableSelection(table=view, columns=tuple(columns), key="key", in_broker=True)


KINDS: Final = {column.name: column.kind for column in columns_of(FOLDER).columns} | {
    "recalled_at": ColumnKind.TIMESTAMP
}


def read_timed_out(spark: SparkSession, store: Store, manifest: Manifest) -> DataFrame | None:
    """The messages that timed out in a group, of all passes; None if no message did."""
    named = {f"pass={each.name}" for each in manifest.passes}
    folders = [store.spark_path(f"{TIMED_OUT}/{name}") for name in store.folders(TIMED_OUT) if name in named]
    return spark.read.schema(columns_of(TIMED_OUT).schema).parquet(*folders) if folders else None


def read_passes(spark: SparkSession, folders: list[str]) -> DataFrame:
    """The archived messages in these folders, with the columns `pass` and `day`."""
    reader = spark.read.option("basePath", folders[0].rpartition("/")[0])
    return reader.schema(archived_messages().schema.add("day", "date")).parquet(*folders)


def archived_messages(*conditions: str) -> TableSelection:
    """The messages that satisfy the conditions, with all columns that the archive keeps."""
    columns = tuple(Column(name, name, kind) for name, kind in KINDS.items())
    return TableSelection(
        table=FOLDER, columns=columns, key="key", conditions=conditions, span="log_id", in_broker=True
    )


class ArchivedSource(PostgresSource):
    """Reads messages from the log, and older messages from the archive.

    An older message was stored before the time up to which retention may have removed messages from the log. A message
    that is in both log and archive is read only from the log.
    """

    def __init__(self, spark: SparkSession, database: DatabaseRule, location: str, name: str = adbc.NAME) -> None:
        super().__init__(spark, database, name)
        self._manifest = load_manifest(Store(location))
        # The log has what is not settled, so the state at the end of the newest pass is not read.
        settled = None if self._manifest is None else replace(self._manifest, state="")
        self._files = ArchiveSource(spark, replace(database, kind=SourceKind.ARCHIVE, location=location), settled)
        self._edges: dict[str, datetime | None] = {}

    def close(self) -> None:
        super().close()
        self._edges.clear()

    def horizon(self, topic: str) -> datetime | None:
        """The time before which messages may be missing in both archive and log. If some are missing between the two,
        it is that of the log alone."""
        live = self.live_horizon(topic)
        if live is None or self._manifest is None:
            return live
        schema = self._database.schema
        for name, removed, taken, _ in removed_by_topic(self, schema, self._manifest.until):
            if name == topic and self._manifest.missing(topic, removed, taken) > 0:
                return live
        return self._manifest.complete_from(topic)

    def live_horizon(self, topic: str) -> datetime | None:
        """The time before which retention may have removed messages of the topic from the log."""
        return super().horizon(topic)

    def is_needed(self, topic: str, since: datetime | None) -> bool:
        """Whether some messages from `since` on may be in the archive and not in the log."""
        edge = self._edge((("topic", topic),))
        return self._manifest is not None and edge is not None and (since is None or since < edge)

    def read(
        self, selections: Sequence[TableSelection], since: datetime | None, until: datetime | None = None
    ) -> DataFrame:
        frames = [super().read(selections, since, until)]
        for selection in selections:
            edge = self._archived_before(selection)
            if edge is None or (since is not None and since >= edge):
                continue
            end = edge if until is None else min(edge, until)
            there = super().read([selection], since, end).select("log_id")
            found = self._files.read([selection], since, end).join(there, "log_id", "left_anti")
            frames.append(found.select(*frames[0].columns))
        return reduce(DataFrame.unionByName, frames)

    def read_keys(self, wanted: Sequence[tuple[TableSelection, Sequence[str]]]) -> DataFrame:
        live = super().read_keys(wanted)
        frames = [live]
        for selection, keys in wanted:
            edge = self._archived_before(selection)
            if edge is not None:
                older = f"stored_at < timestamp_micros({round(edge.timestamp() * 1_000_000)})"
                limited = replace(selection, conditions=(*selection.conditions, older))
                found = self._files.read_keys([(limited, keys)]).join(live.select("log_id"), "log_id", "left_anti")
                frames.append(found.select(*live.columns))
        return reduce(DataFrame.unionByName, frames)

    def _archived_before(self, selection: TableSelection) -> datetime | None:
        """The time before which messages are also read from the archive; None if the archive is not read."""
        has_passes = self._manifest is not None and bool(self._manifest.passes)
        return self._edge(selection.equals) if has_passes and selection.table in (FOLDER, TIMED_OUT) else None

    def _edge(self, equals: tuple[tuple[str, str], ...]) -> datetime | None:
        """The time before which retention may have removed messages of the topic in `equals` from the log, in this
        snapshot. If `equals` names no topic, the result is the newest of these times over all topics."""
        topic = dict(equals).get("topic", "")
        if topic not in self._edges:
            where = sql.where([f"topic = {sql.text(topic)}"] if topic else [])
            view = sql.table_name("topic_v1", self._database.schema)
            newest = self.query(f"SELECT max(pruned_at - retention_seconds * interval '1 s') FROM {view}{where}")[0][0]
            self._edges[topic] = None if newest is None else newest.astimezone(UTC)
        return self._edges[topic]


class ArchiveSource(FrameSource):
    """The archive alone as the broker: all its passes, and the state of the log at the end of the newest one.

    A run judges the rows up to the end of the newest pass.
    """

    def __init__(self, spark: SparkSession, database: DatabaseRule, manifest: Manifest | None = None) -> None:
        super().__init__(spark, database)
        self._store = Store(database.location)
        self._manifest = manifest

    def open(self, timed: Sequence[TableSelection]) -> SourceBoundary:
        """The watermark is the end of the newest pass."""
        manifest = self._manifest = load_manifest(self._store)
        if manifest is None or manifest.until is None:
            raise UsageProblem(
                f"there is no archive at {self._store.path(MANIFEST)}: create it with outbox-reconcile archive."
            )
        if not manifest.state:
            raise RunIncomplete(
                f"the archive {self._database.location} does not have the undecided, parked and dead messages, because "
                f"an erasure has removed them. Run outbox-reconcile archive again."
            )
        return SourceBoundary(
            database=self._database.name,
            taken_at=datetime.now(UTC),
            watermark=datetime.fromisoformat(manifest.until),
            identity=manifest.broker,
            snapshot=f"pass {manifest.passes[-1].name}",
        )

    def table(self, selection: TableSelection) -> DataFrame:
        """Raises TableMissing for a view that the archive does not have."""
        manifest = self._manifest
        assert manifest is not None
        if selection.table == FOLDER:
            settled = read_passes(self._spark, [self._store.spark_path(each.folder) for each in manifest.passes])
            if not manifest.state:
                return settled
            open_ones = self._state(FOLDER, archived_messages().schema, manifest)
            return settled.select(*KINDS).unionByName(open_ones.select(*KINDS))
        if selection.table == DEAD:
            return self._state(DEAD, columns_of(DEAD).schema, manifest)
        if selection.table == TIMED_OUT:
            found = read_timed_out(self._spark, self._store, manifest)
            return self._spark.createDataFrame([], columns_of(TIMED_OUT).schema) if found is None else found
        needs = (
            "name the effect table of each group, because the archive does not have the positions of groups"
            if selection.table == "delivery_v1"
            else "read it from its own database"
        )
        raise TableMissing(f"the archive {self._database.location} has no table {selection.table!r}: {needs}.")

    def horizon(self, topic: str) -> datetime | None:
        """Before this time, messages are neither in the archive nor were they in the log."""
        return None if self._manifest is None else self._manifest.complete_from(topic)

    def _state(self, view: str, schema: StructType, manifest: Manifest) -> DataFrame:
        path = self._store.spark_path(f"{STATE}/pass={manifest.state}/{view}")
        return self._spark.read.schema(schema).parquet(path)
