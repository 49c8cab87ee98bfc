"""Reads all sides of a rule (rows, messages, effects) from its sources, for a window of time or for some keys.

The first look reads a window (`of_window`). The second look reads the keys that the first look suspects (`about_keys`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import reduce
from typing import Final

from pyspark import StorageLevel
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from ..judging import evidence
from ..judging.remedies import UUID
from ..rules.rule import Rule
from ..sources import contract
from ..sources.base import DataSource, TableSelection
from ..sources.databases import Sources
from ..sources.values import in_calendar
from .prepare import PreparedRule, margin

# The largest number of keys that one query names.
MAX_KEYS: Final = 50_000


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """For each side, the conditions for the rows that the run must read after it has compared the checksums.

    The value () means that the run must read all rows of the side. If `is_nothing` is true, the run must read no row.
    """

    rows: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    effects: tuple[tuple[str, ...], ...] = ()
    is_nothing: bool = False


@dataclass(frozen=True, slots=True)
class _Tables:
    """The selections of a rule by source: business tables, effects with message ids, and the broker's views."""

    tables: dict[DataSource, list[TableSelection]]
    by_message: dict[DataSource, list[TableSelection]]
    broker: list[TableSelection]


def _tables(
    prepared: PreparedRule, sources: Sources, limits: ReadLimits | None = None, *, detailed: bool = False
) -> _Tables:
    rule, limits = prepared.rule, limits or ReadLimits()
    tables = {sources[rule.database]: [_limited(contract.rows(rule, detailed=detailed), limits.rows)]}
    by_message: dict[DataSource, list[TableSelection]] = {}
    broker = [_limited(contract.messages(rule, detailed=detailed), limits.messages)]
    for number, group in enumerate(rule.groups):
        selection = contract.effects(rule, number, detailed=detailed)
        if limits.effects:
            selection = _limited(selection, limits.effects[number])
        if selection.in_broker:
            broker.append(selection)
        else:
            found = by_message if group.message_id else tables
            found.setdefault(sources[group.database], []).append(selection)
    for view, ended in (("dead_letter_v1", contract.dead_letters), ("timed_out_v1", contract.timed_out)):
        if rule.groups and view not in prepared.missing_views:
            broker.append(ended(rule, detailed=detailed))
    return _Tables(tables, by_message, broker)


def of_window(prepared: PreparedRule, limits: ReadLimits, sources: Sources) -> list[DataFrame]:
    """All sides of the rule's window, in the narrow form of the module `evidence`.

    The read begins a little before the window, because a message may be older than its row's time. For a window with
    `is_exact`, the read ends later than the window: by the longest limit of the rule, or by the margin if the margin is
    longer. The second look finds later messages and effects by key.
    """
    rule, window = prepared.rule, prepared.window
    start = None if window.since is None else window.since - margin(rule)
    end = window.until + max(margin(rule), rule.longest_wait) if window.is_exact else None
    wanted = _tables(prepared, sources, limits)
    messages = sources.broker.read(wanted.broker, start, end)
    tables = [source.read(selections, start, end) for source, selections in wanted.tables.items()]
    if start is not None and not window.is_exact:
        # A key may also have a row before this window. The run reads this row too, because its message would otherwise
        # count as the message of the row in this window.
        repeated = sources[rule.database].repeated(contract.rows(rule), start)
        tables += [] if repeated is None else [repeated]
    for source, selections in wanted.by_message.items():
        ids = sources.broker.read([contract.message_ids()], start, end)
        tables.append(evidence.with_keys(source.read(selections, start, end), ids, rule, window.floor))
    return [evidence.broker_side(messages, rule), *(evidence.table_side(table, rule) for table in tables)]


@dataclass(frozen=True, slots=True)
class KeySides:
    """All evidence about some keys: the sides in the narrow form, and the columns that a finding shows. The caller must
    unpersist the frames in `cached`. Only `rows` has the rows without a time."""

    narrow: list[DataFrame]
    rows: DataFrame
    effects: DataFrame
    messages: DataFrame
    dead_letters: DataFrame
    deliveries: DataFrame | None
    cached: list[DataFrame]

    @property
    def keys(self) -> DataFrame:
        """The keys about which the look-up found a row, a message or an effect."""
        return reduce(DataFrame.unionByName, [side.select("key") for side in self.narrow]).distinct()


def about_keys(prepared: PreparedRule, keys: DataFrame, listed: Sequence[str], sources: Sources) -> KeySides:
    """All evidence about `keys` (a result of `real_keys`), from any time. `listed` has the first MAX_KEYS + 1 of these
    keys."""
    if len(listed) > MAX_KEYS:
        return of_many_keys(prepared, keys.select("key"), sources)

    def read(source: DataSource, selections: Sequence[TableSelection]) -> DataFrame:
        return source.read_keys([(each, listed) for each in selections])

    def read_by_id(source: DataSource, selections: Sequence[TableSelection], ids: DataFrame) -> DataFrame:
        named = [row[0] for row in ids.select("message_id").collect()]
        named += [key for key in listed if re.fullmatch(UUID, key)]
        return source.read_keys([(each, named) for each in selections])

    wanted = _tables(prepared, sources, detailed=True)
    # A row without a time is not judged, but the finding about its message must not say that there is no row. An effect
    # without a time happened, and a remedy must not let it happen again.
    for selections in (*wanted.tables.values(), *wanted.by_message.values()):
        selections[:] = [replace(each, time=None) for each in selections]
    return _key_sides(prepared, sources, wanted, read, read_by_id)


def of_many_keys(prepared: PreparedRule, keys: DataFrame, sources: Sources, since: datetime | None = None) -> KeySides:
    """All evidence about `keys`, read without indexes. Spark reads all rows (from `since` on), and joins the rows with
    `keys`."""

    def read(source: DataSource, selections: Sequence[TableSelection]) -> DataFrame:
        frame = source.read(selections, since)
        return frame.join(keys, F.coalesce(frame["key"], F.lit("")) == keys["key"], "left_semi")

    def read_by_id(source: DataSource, selections: Sequence[TableSelection], _: DataFrame) -> DataFrame:
        return source.read(selections, since)

    return _key_sides(prepared, sources, _tables(prepared, sources, detailed=True), read, read_by_id)


def real_keys(rule: Rule, sources: Sources, keys: DataFrame) -> DataFrame:
    """Replace each message id among `keys` (key, carried, sought_at) with the key of the message.

    If a message is older than the window, the first look has only the message's id as the key of an effect. The
    function removes the ids of messages of other topics, because the rule does not judge the effects of these messages.
    """
    if not any(group.message_id for group in rule.groups):
        return keys
    named = [row[0] for row in keys.where(F.col("key").rlike(UUID)).select("key").collect()]
    if not named:
        return keys
    ids = sources.broker.read_keys([(contract.message_ids(), named)])
    real = evidence.with_keys(keys, ids, rule, None).groupBy(F.coalesce("key", F.lit("")).alias("key"))
    return real.agg(F.max("carried").alias("carried"), F.min("sought_at").alias("sought_at"))


def _key_sides(
    prepared: PreparedRule,
    sources: Sources,
    wanted: _Tables,
    read: Callable[[DataSource, Sequence[TableSelection]], DataFrame],
    read_by_id: Callable[[DataSource, Sequence[TableSelection], DataFrame], DataFrame],
) -> KeySides:
    """The evidence in the tables `wanted`. `read` reads the rows with the keys, and `read_by_id` the effects with the
    message ids of a frame."""
    rule = prepared.rule
    # Spark caches the messages on disk, because wide bodies do not fit in Java's memory.
    broker = evidence.read_again(read(sources.broker, wanted.broker), rule).persist(StorageLevel.DISK_ONLY)
    tables = [read(source, selections) for source, selections in wanted.tables.items()]
    of_rule = (F.lit(rule.topic).alias("topic"), F.lit(rule.tag).alias("tag"))
    ids = broker.select("message_id", "key", *of_rule, "log_id").where("message_id IS NOT NULL").distinct()
    for source, selections in wanted.by_message.items():
        tables.append(evidence.with_keys(read_by_id(source, selections, ids), ids, rule, prepared.window.floor))
    has_deliveries = rule.groups and "delivery_v1" not in prepared.missing_views
    deliveries = read(sources.broker, [contract.deliveries(rule)]) if has_deliveries else None
    own = tables[0].persist(StorageLevel.DISK_ONLY)
    cached = [own, broker]
    is_judged = (own["kind"] != contract.ROW_KIND) | own["at"].isNotNull()
    narrow = [evidence.table_side(table, rule) for table in (own.where(is_judged), *tables[1:])]
    is_message = broker["state"].isin(*contract.MESSAGE_STATES)
    messages = in_calendar(broker.where(is_message))
    if rule.message_when:
        # The views of dead letters and of messages that timed out have neither headers nor body. So such a row belongs
        # to the rule if its message satisfies `message_when`.
        is_of_group = broker["state"].startswith("dead ") | broker["state"].startswith("timed out ")
        ours = broker.where(is_of_group).join(messages.select("log_id"), "log_id", "left_semi").select(*broker.columns)
        broker = broker.where(~is_of_group).unionByName(ours)
    effects = reduce(DataFrame.unionByName, (own, *(table.drop("log_id") for table in tables[1:])))
    return KeySides(
        narrow=[evidence.broker_side(broker, rule, is_exact=True), *narrow],
        rows=own.where(own["kind"] == contract.ROW_KIND),
        effects=effects.where(F.col("kind") != contract.ROW_KIND),
        messages=messages,
        dead_letters=broker.where(broker["state"].startswith("dead ")),
        deliveries=deliveries,
        cached=cached,
    )


def _limited(selection: TableSelection, conditions: tuple[str, ...]) -> TableSelection:
    return replace(selection, conditions=(*selection.conditions, *conditions))
