"""A broker whose log goes on in an archive: messages that retention has removed are read from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import reduce

from pyspark.sql import DataFrame, SparkSession

from ..archive import manifest as archive
from ..output.store import Store
from ..rules.rule import DatabaseRule, SourceKind
from . import adbc, sql
from .base import TableSelection
from .files import FrameSource
from .postgres import PostgresSource


class ArchivedSource(PostgresSource):
    """What is still in the log comes from there; what may be gone from the archive, less what is there all the same."""

    def __init__(self, spark: SparkSession, database: DatabaseRule, location: str, name: str = adbc.NAME) -> None:
        super().__init__(spark, database, name)
        store = Store(location)
        self._manifest = archive.load(store)
        folders = [store.spark_path(each.folder) for each in self._manifest.passes] if self._manifest else []
        self._files = _ArchiveFiles(spark, replace(database, kind=SourceKind.PARQUET, location=location), folders)
        self._edges: dict[str, datetime | None] = {}

    def close(self) -> None:
        """See Source."""
        super().close()
        self._edges.clear()

    def horizon(self, topic: str) -> datetime | None:
        """See Source: with the archive. Where messages are missing between it and the log it counts for nothing."""
        live = self.live_horizon(topic)
        if live is None or self._manifest is None:
            return live
        schema = self._database.schema
        for name, removed, taken, _ in archive.removed_by_topic(self, schema, self._manifest.until):
            if name == topic and self._manifest.missing(topic, removed, taken):
                return live
        return self._manifest.complete_from(topic)

    def live_horizon(self, topic: str) -> datetime | None:
        """The horizon of the log alone."""
        return super().horizon(topic)

    def is_needed(self, topic: str, since: datetime | None) -> bool:
        """Whether messages from `since` on may be in the archive only."""
        edge = self._edge((("topic", topic),))
        return self._manifest is not None and edge is not None and (since is None or since < edge)

    def read(
        self, selections: Sequence[TableSelection], since: datetime | None, until: datetime | None = None
    ) -> DataFrame:
        """See Source."""
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
        """See Source."""
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
        """Messages stored before this time are looked for in the archive too; None: nothing is."""
        if selection.table != archive.FOLDER or self._manifest is None or not self._manifest.passes:
            return None
        return self._edge(selection.equals)

    def _edge(self, equals: tuple[tuple[str, str], ...]) -> datetime | None:
        """The live horizon of the topic (of all, if none is named) as of this snapshot."""
        topic = dict(equals).get("topic", "")
        if topic not in self._edges:
            where = sql.where([f"topic = {sql.text(topic)}"] if topic else [])
            view = sql.table_name("topic_v1", self._database.schema)
            newest = self.query(f"SELECT max(pruned_at - retention_seconds * interval '1 s') FROM {view}{where}")[0][0]
            self._edges[topic] = None if newest is None else newest.astimezone(UTC)
        return self._edges[topic]


class _ArchiveFiles(FrameSource):
    """The passes of the archive as the view they were taken from."""

    def __init__(self, spark: SparkSession, database: DatabaseRule, folders: list[str]) -> None:
        super().__init__(spark, database)
        self._folders = folders

    def table(self, selection: TableSelection) -> DataFrame:
        """See FrameSource."""
        return archive.read(self._spark, self._folders)
