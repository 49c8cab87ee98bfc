"""The databases of a rules file. The order of their snapshots guarantees that no row appears without its message."""

from __future__ import annotations

from pyspark.sql import SparkSession

from ..rules.rule import DatabaseRule, Rules, SourceKind
from . import contract
from .adbc import NAME
from .archived import ArchivedSource, ArchiveSource
from .base import DataSource, SourceBoundary, TableSelection
from .files import FileSource
from .lake import LakeSource
from .postgres import PostgresSource


class Sources:
    """The databases of a rules file. `open_all` takes the snapshots of the applications first, then the snapshot of the
    broker, then the snapshots of other databases with effects.

    A half message is stored before its row commits. So if a row is in an application's snapshot, its half message is in
    the broker's later snapshot. An effect is newer than its message, so effects are read last.
    """

    def __init__(self, spark: SparkSession, rules: Rules, name: str = NAME) -> None:
        """`name` is the application_name of the sessions in the databases."""
        self._rules = rules
        broker = rules.databases[rules.broker]
        self.broker: DataSource = _source(spark, broker, name)
        if rules.archive is not None and isinstance(self.broker, PostgresSource):
            self.broker = ArchivedSource(spark, broker, rules.archive, name)
        self._by_name: dict[str, DataSource] = {rules.broker: self.broker}
        for alias, database in rules.databases.items():
            same = (database.kind, database.location) == (broker.kind, broker.location)
            self._by_name.setdefault(alias, self.broker if same else _source(spark, database, name))

    def __getitem__(self, name: str) -> DataSource:
        return self._by_name[name]

    def open_all(self) -> list[SourceBoundary]:
        """Take the snapshots of all databases, in the order that the class describes."""
        with_rows = [rule.database for rule in self._rules.rules]
        with_effects = [group.database for rule in self._rules.rules for group in rule.groups if group.table]
        in_order = dict.fromkeys(self[name] for name in (*with_rows, self._rules.broker, *with_effects))
        return [source.open(self._timed(source)) for source in in_order]

    @property
    def all(self) -> list[DataSource]:
        """Each source once."""
        return list(dict.fromkeys(self._by_name.values()))

    def close_all(self) -> None:
        """Release all snapshots."""
        for source in self.all:
            source.close()

    def _timed(self, source: DataSource) -> list[TableSelection]:
        timed = [contract.rows(rule) for rule in self._rules.rules if self[rule.database] is source]
        if source is self.broker:
            timed += [contract.messages(rule) for rule in self._rules.rules]
        for rule in self._rules.rules:
            for number, group in enumerate(rule.groups):
                if group.table and self[group.database] is source:
                    timed.append(contract.effects(rule, number))
        return timed


def _source(spark: SparkSession, database: DatabaseRule, name: str) -> DataSource:
    if database.kind is SourceKind.POSTGRES:
        return PostgresSource(spark, database, name)
    if database.kind in (SourceKind.DELTA, SourceKind.ICEBERG, SourceKind.CATALOG):
        return LakeSource(spark, database)
    if database.kind is SourceKind.ARCHIVE:
        return ArchiveSource(spark, database)
    return FileSource(spark, database)
