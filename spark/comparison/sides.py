"""All sides of a rule, read from their sources: a window of time, or everything about some keys."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import reduce
from typing import Final

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from ..errors import RunIncomplete, TableMissing, UsageProblem
from ..rules.rule import DatabaseRule, Rule, Rules, SourceKind
from ..sources.adbc import NAME
from ..sources.archived import ArchivedSource
from ..sources.base import DataSource, SourceBoundary, TableSelection
from ..sources.files import FileSource, JdbcSource
from ..sources.postgres import PostgresSource
from . import classify, contract, evidence

UUID: Final = re.compile(r"^[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}$")


class Sources:
    """The databases of a rules file. `open_all` reads applications first, then the broker, then effects elsewhere.

    A row that the first snapshot shows has its half message in the second: the half is stored before the row commits.
    An effect that the second snapshot's messages led to can only be newer, so it is looked for last.
    """

    def __init__(self, spark: SparkSession, rules: Rules, name: str = NAME) -> None:
        """`name` is what the sessions in the databases are called."""
        self._rules = rules
        self.broker: DataSource = _source(spark, rules.databases[rules.broker], name)
        if rules.archive is not None and isinstance(self.broker, PostgresSource):
            self.broker = ArchivedSource(spark, rules.databases[rules.broker], rules.archive, name)
        self.missing: set[str] = set()
        self._by_name: dict[str, DataSource] = {rules.broker: self.broker}
        for alias, database in rules.databases.items():
            same = _is_same(database, rules.databases[rules.broker])
            self._by_name.setdefault(alias, self.broker if same else _source(spark, database, name))

    def __getitem__(self, name: str) -> DataSource:
        return self._by_name[name]

    def open_all(self) -> list[SourceBoundary]:
        """Take all snapshots, in the order that leaves no gap."""
        with_rows = list(dict.fromkeys(rule.database for rule in self._rules.rules))
        with_effects = [group.database for rule in self._rules.rules for group in rule.groups if group.table]
        readings: list[SourceBoundary] = []
        opened: list[DataSource] = []
        for name in dict.fromkeys([*with_rows, self._rules.broker, *with_effects]):
            if self[name] not in opened:
                opened.append(self[name])
                readings.append(self[name].open(self._timed(name)))
        return readings

    def close_all(self) -> None:
        """Release all snapshots."""
        for source in self._by_name.values():
            source.close()

    def _timed(self, name: str) -> list[TableSelection]:
        source = self[name]
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
    if database.kind is SourceKind.JDBC:
        return JdbcSource(spark, database)
    return FileSource(spark, database)


def _is_same(one: DatabaseRule, other: DatabaseRule) -> bool:
    return (one.kind, one.location) == (other.kind, other.location)


_WITHOUT: Final = {
    "dead_letter_v1": "dead_letter_v1 is not among the exports: what a group gave up is UNDELIVERED here, not DEAD",
    "delivery_v1": "delivery_v1 is not among the exports: how far a message got with a group is not said",
}


def check(rule: Rule, sources: Sources) -> list[str]:
    """Raise UsageProblem unless every table and column of the rule is there and can be compared.

    Returns what is to be said of exports that lack a view that only adds to a finding.
    """
    sources[rule.database].check(contract.rows(rule))
    sources.broker.check(contract.messages(rule, detailed=True))
    for number, group in enumerate(rule.groups):
        source = sources[group.database] if group.table else sources.broker
        source.check(contract.effects(rule, number))
    notes = []
    for selection in (contract.dead_letters(rule), contract.deliveries(rule)) if rule.groups else ():
        try:
            sources.broker.check(selection)
        except TableMissing:
            sources.missing.add(selection.table)
            notes.append(_WITHOUT[selection.table])
    return notes


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """What a pre-filter left to be read: conditions per side, of which () is everything, or nothing at all."""

    rows: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    effects: tuple[tuple[str, ...], ...] = ()
    is_nothing: bool = False


@dataclass(frozen=True, slots=True)
class _Tables:
    """The selections of a rule by source: business tables, and what the broker knows."""

    tables: list[tuple[DataSource, list[TableSelection]]]
    by_message: list[tuple[DataSource, list[TableSelection]]]
    broker: list[TableSelection]


def _tables(rule: Rule, sources: Sources, limits: ReadLimits, *, detailed: bool = False) -> _Tables:
    tables = [(sources[rule.database], [_limited(contract.rows(rule), limits.rows)])]
    by_message: list[tuple[DataSource, list[TableSelection]]] = []
    broker = [_limited(contract.messages(rule, detailed=detailed), limits.messages)]
    for number, group in enumerate(rule.groups):
        selection = contract.effects(rule, number, detailed=detailed)
        if limits.effects:
            selection = _limited(selection, limits.effects[number])
        if selection.in_broker:
            broker.append(selection)
        else:
            _add(by_message if group.message_id else tables, sources[group.database], selection)
    if rule.groups and "dead_letter_v1" not in sources.missing:
        broker.append(contract.dead_letters(rule, detailed=detailed))
    return _Tables(tables, by_message, broker)


def _add(to: list[tuple[DataSource, list[TableSelection]]], source: DataSource, selection: TableSelection) -> None:
    for known, selections in to:
        if known is source:
            selections.append(selection)
            return
    to.append((source, [selection]))


def of_window(rule: Rule, sources: Sources, window: classify.Window, limits: ReadLimits) -> list[DataFrame]:
    """The narrow sides of a window. Read a little further back than it: a message may be older than its row's time.

    Of an exact window also only as far ahead as an answer may take; what came later is found by key.
    """
    start = None if window.since is None else window.since - margin(rule)
    end = window.until + max(margin(rule), rule.longest_wait) if window.is_exact else None
    wanted = _tables(rule, sources, limits)
    messages = sources.broker.read(wanted.broker, start, end)
    tables = [source.read(selections, start, end) for source, selections in wanted.tables]
    if start is not None and not window.is_exact:
        # A row of a key that an earlier window has judged: its own message would make it look as it should.
        repeated = sources[rule.database].repeated(contract.rows(rule), start)
        tables += [] if repeated is None else [repeated]
    by_message = []
    for source, selections in wanted.by_message:
        ids = sources.broker.read([contract.message_ids()], start, end)
        effects = source.read(selections, start, end)
        by_message.append(effects)
        tables.append(evidence.with_keys(effects, ids, rule, window.floor))
    narrow = [evidence.broker_side(messages, rule), *(evidence.table_side(table, rule) for table in tables)]
    if _tells_messages_apart(rule):
        narrow += _waiting(rule, sources.broker.read([contract.owing(rule)], start, end), messages, by_message)
    return narrow


def _tells_messages_apart(rule: Rule) -> bool:
    return rule.counts_each_message and any(group.key is None for group in rule.groups)


def _waiting(rule: Rule, owing: DataFrame, broker: DataFrame, by_message: list[DataFrame]) -> list[DataFrame]:
    """Per group whose effects name their messages: the messages of which it shows none."""
    found = []
    for number, group in enumerate(rule.groups):
        if group.key is not None:
            continue
        owed = owing.where(F.col("owed").bitwiseAND(F.lit(1 << number)) != 0)
        if group.table is None:
            done = broker.where(F.col("state") == contract.effect_state(number)).select("log_id")
            left = owed.join(done, "log_id", "left_anti")
        else:
            kind = F.col("kind") == contract.EFFECT_KIND + number
            done = reduce(DataFrame.unionByName, by_message).where(kind).select(F.col("key").alias("message_id"))
            left = owed.join(done, "message_id", "left_anti")
        found.append(evidence.waiting_side(left, rule, number))
    return found


def margin(rule: Rule) -> timedelta:
    """How much further back than a time is read: a message may be older than its row's time."""
    return timedelta(seconds=max(60.0, rule.grace_seconds))


@dataclass(frozen=True, slots=True)
class KeySides:
    """Everything about some keys: the narrow sides, and what a finding shows of them. `cached` is to be released."""

    narrow: list[DataFrame]
    rows: DataFrame
    messages: DataFrame
    dead_letters: DataFrame
    deliveries: DataFrame | None
    cached: list[DataFrame]


def of_keys(rule: Rule, sources: Sources, keys: Sequence[str], floor: datetime | None = None) -> KeySides:
    """All sides for these keys (see `real_keys`), in any window."""
    wanted = _tables(rule, sources, ReadLimits(), detailed=True)
    messages = sources.broker.read_keys([(selection, keys) for selection in wanted.broker])
    # Wide bodies fit on the disk, not in Java's memory.
    broker = messages.persist(StorageLevel.DISK_ONLY)
    tables = [source.read_keys([(each, keys) for each in selections]) for source, selections in wanted.tables]
    by_message = []
    for source, selections in wanted.by_message:
        ids = _ids(rule, broker)
        named = [
            *(row[0] for row in ids.select("message_id").collect()),
            *(key for key in keys if UUID.fullmatch(key)),
        ]
        effects = source.read_keys([(each, named) for each in selections])
        by_message.append(effects)
        tables.append(evidence.with_keys(effects, ids, rule, floor))
    has_deliveries = rule.groups and "delivery_v1" not in sources.missing
    deliveries = sources.broker.read_keys([(contract.deliveries(rule), keys)]) if has_deliveries else None
    waiting = []
    if _tells_messages_apart(rule):
        waiting = _waiting(rule, sources.broker.read_keys([(contract.owing(rule), keys)]), broker, by_message)
    return _key_sides(rule, tables, broker, deliveries, waiting)


def of_many_keys(
    rule: Rule, sources: Sources, keys: DataFrame, floor: datetime | None = None, since: datetime | None = None
) -> KeySides:
    """As `of_keys`, for more keys than fit a query: everything (from `since` on) is read and joined with `keys`."""

    def only(frame: DataFrame) -> DataFrame:
        return frame.join(keys, F.coalesce(frame["key"], F.lit("")) == keys["key"], "left_semi")

    wanted = _tables(rule, sources, ReadLimits(), detailed=True)
    broker = only(sources.broker.read(wanted.broker, since)).persist(StorageLevel.DISK_ONLY)
    tables = [only(source.read(selections, since)) for source, selections in wanted.tables]
    by_message = []
    for source, selections in wanted.by_message:
        by_message.append(source.read(selections, since))
        tables.append(evidence.with_keys(by_message[-1], _ids(rule, broker), rule, floor))
    has_deliveries = rule.groups and "delivery_v1" not in sources.missing
    deliveries = only(sources.broker.read([contract.deliveries(rule)], since)) if has_deliveries else None
    waiting = []
    if _tells_messages_apart(rule):
        waiting = _waiting(rule, only(sources.broker.read([contract.owing(rule)], since)), broker, by_message)
    return _key_sides(rule, tables, broker, deliveries, waiting)


def _ids(rule: Rule, messages: DataFrame) -> DataFrame:
    known = messages.where(F.col("message_id").isNotNull())
    return known.select("message_id", "key", F.lit(rule.topic).alias("topic"), F.lit(rule.tag).alias("tag")).distinct()


def real_keys(rule: Rule, sources: Sources, keys: DataFrame) -> DataFrame:
    """`keys` (key, carried, sought_at) with the keys of messages in place of their ids.

    The first look knows an effect by its message's id where that message is older than the window. Ids of other topics'
    messages are left out: their effects are not the rule's.
    """
    if not any(group.message_id for group in rule.groups):
        return keys
    named = [row[0] for row in keys.where(F.col("key").rlike(UUID.pattern)).select("key").collect()]
    if not named:
        return keys
    ids = sources.broker.read_keys([(contract.message_ids(), named)]).cache()
    is_ours = F.col("topic") == F.lit(rule.topic)
    is_ours = is_ours if rule.tag is None else is_ours & (F.col("tag") == F.lit(rule.tag))
    known = ids.select("message_id", F.col("key").alias("of"), is_ours.alias("is_ours"))
    found = keys.join(known, keys["key"] == known["message_id"], "left").where(F.coalesce("is_ours", F.lit(True)))
    key = F.when(F.col("message_id").isNotNull(), F.coalesce("of", F.lit(""))).otherwise(F.col("key"))
    real = found.select(key.alias("key"), "carried", "sought_at")
    return real.groupBy("key").agg(F.max("carried").alias("carried"), F.min("sought_at").alias("sought_at"))


def _key_sides(
    rule: Rule, tables: list[DataFrame], broker: DataFrame, deliveries: DataFrame | None, waiting: list[DataFrame]
) -> KeySides:
    own = tables[0].persist(StorageLevel.DISK_ONLY)
    narrow = [evidence.table_side(table, rule) for table in (own, *tables[1:])]
    is_message = broker["state"].isin(*contract.MESSAGE_STATES)
    messages = broker.where(is_message)
    if rule.message_when:
        # A dead letter has neither headers nor body: whether it is the rule's is known by its message.
        letters = broker.where(broker["state"].startswith("dead "))
        ours = letters.join(messages.select("log_id"), "log_id", "left_semi").select(*broker.columns)
        broker = broker.where(~broker["state"].startswith("dead ")).unionByName(ours)
    return KeySides(
        narrow=[evidence.broker_side(broker, rule, is_exact=True), *narrow, *waiting],
        rows=own.where(own["kind"] == contract.ROW_KIND),
        messages=messages,
        dead_letters=broker.where(broker["state"].startswith("dead ")),
        deliveries=deliveries,
        cached=[own, broker],
    )


def check_not_empty(rule: Rule, sources: Sources, floor: datetime | None, seen: tuple[bool, bool]) -> None:
    """Raise RunIncomplete when rows or messages are not there at all. Those `seen` in the window are not looked for.

    No message is no problem where retention has removed messages, and no row is newer than its `floor`: it is quiet.
    """
    if rule.allow_empty or all(seen):
        return
    (has_rows, has_messages), rows = seen, contract.rows(rule)
    is_quiet = floor is not None and sources[rule.database].is_empty(rows, floor)
    if not has_rows and sources[rule.database].is_empty(rows):
        problem = f"no row of {rule.table!r} satisfies its condition"
    elif not has_messages and not is_quiet and sources.broker.is_empty(contract.messages(rule)):
        problem = f"the broker has no message of topic {rule.topic!r}"
    else:
        return
    raise RunIncomplete(
        f"rule {rule.name!r}: {problem}: there is nothing to compare, which is not the same as clean. Check the "
        f"connection and the rule; where a side may be empty, write allow_empty = true."
    )


def known_topic(rule: Rule, sources: Sources) -> datetime | None:
    """The time before which the topic's messages may be gone. Raises UsageProblem for a topic that is not declared."""
    try:
        if isinstance(sources.broker, ArchivedSource) and any(not group.table for group in rule.groups):
            # How far groups were is not archived.
            return sources.broker.live_horizon(rule.topic)
        return sources.broker.horizon(rule.topic)
    except UsageProblem as error:
        raise UsageProblem(f"rule {rule.name!r}: {error}") from error


def _limited(selection: TableSelection, conditions: tuple[str, ...]) -> TableSelection:
    if not conditions:
        return selection
    return TableSelection(
        table=selection.table,
        columns=selection.columns,
        key=selection.key,
        time=selection.time,
        conditions=(*selection.conditions, *conditions),
        equals=selection.equals,
        span=selection.span,
        in_broker=selection.in_broker,
    )
