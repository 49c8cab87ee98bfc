"""The second stage: skip the buckets of time in which the checksums of both sides are equal.

Each database hashes its own rows, message bodies or effects, per bucket of the row's time. The database of the messages
must know the time of each message's row, so the message body must contain this time. If the counts and checksums of a
bucket are equal on all sides, every row in the bucket has its effects and its message with the declared fields. The run
reads and classifies only the buckets that differ. If SQL cannot compute the checksums of a rule, the note gives the
reason, and the run reads everything.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ..common.errors import ReconcileError
from ..judging.classify import Window
from ..rules.rule import FieldRule, FieldType, Rule, Rules
from ..sources import contract, sql, values
from ..sources.archived import ArchivedSource
from ..sources.databases import Sources
from ..sources.postgres import PostgresSource
from .prepare import PreparedRule, margin, why_no_checksums
from .sides import ReadLimits


@dataclass(frozen=True, slots=True)
class ComparedChecksums:
    """The result of comparing the checksums of a rule.

    The run does not read the `skipped_rows`, because the checksums of their buckets are equal. `limits` selects the
    rows that the run has to read. `note` is a sentence for the report.
    """

    note: str = ""
    skipped_rows: int = 0
    limits: ReadLimits = field(default_factory=ReadLimits)


_Buckets = dict[int | None, tuple[Any, ...]]
"""The checksums of one side, per bucket. The bucket None has the messages or effects that belong to no bucket of a
row."""


def compare(prepared: PreparedRule, rules: Rules, sources: Sources) -> ComparedChecksums:
    """For a rule with `bucket`, find the buckets that are equal on all sides, and make conditions that select all other
    buckets."""
    rule, window = prepared.rule, prepared.window
    reason = why_no_checksums(rule, rules, sources)
    if reason is not None:
        return ComparedChecksums(f"checksum: not used: {reason}")
    ours, broker = sources[rule.database], sources.broker
    assert isinstance(ours, PostgresSource) and isinstance(broker, PostgresSource)
    if isinstance(broker, ArchivedSource) and broker.is_needed(rule.topic, window.since):
        return ComparedChecksums("checksum: not used, because a part of the window is in the archive")
    try:
        return _Checksums(rule, ours, broker, window).compare()
    except ReconcileError as error:
        return ComparedChecksums(
            f"checksum: not used, because the database could not compute it ({' '.join(str(error).split())[:200]})"
        )


class _Checksums:
    def __init__(self, rule: Rule, ours: PostgresSource, broker: PostgresSource, window: Window) -> None:
        self._rule, self._ours, self._broker, self._window = rule, ours, broker, window
        self._width = max(1, round((rule.bucket_seconds or 0) * 1_000_000))
        self._timed = next(item for item in rule.fields if (item.column, item.type) == (rule.time, FieldType.TIMESTAMP))

    def compare(self) -> ComparedChecksums:
        if not self._keys_are_unique():
            return ComparedChecksums("checksum: not used, because two rows have the same key, or a row has no key")
        rows, effects, messages = self._all_sides()
        if None in messages or any(None in side for side in effects):
            return ComparedChecksums("checksum: not used, because some messages or effects are in no bucket of a row")
        known, nothing = set(rows) | set(messages), (0, 0, 0)
        suspicious = {bucket for bucket, sums in messages.items() if sums[2]} | self._dead()
        suspicious |= {each for each in known if rows.get(each, nothing)[:2] != messages.get(each, nothing)[:2]}
        for side in effects:
            for bucket in set(rows) | set(side):
                count, _, keys = rows.get(bucket, nothing)
                if (count, keys, 0) != side.get(bucket, nothing):
                    suspicious.add(bucket)
        skipped = sum(sums[0] for bucket, sums in rows.items() if bucket not in suspicious)
        note = f"checksum: {len(known - suspicious)} of {len(known)} buckets are equal, {skipped} rows were not read"
        limits = self._limits({bucket for bucket in suspicious if bucket is not None})
        return ComparedChecksums(note, skipped, limits)

    def _all_sides(self) -> tuple[_Buckets, list[_Buckets], _Buckets]:
        """The checksums of the rows, of the effects of each group, and of the messages. Two databases compute at the
        same time."""
        with ThreadPoolExecutor(1) as beside:
            messages = beside.submit(self._messages) if self._broker is not self._ours else None
            rows = self._rows()
            effects = [self._effects(number) for number in range(len(self._rule.groups))]
            return rows, effects, self._messages() if messages is None else messages.result()

    def _keys_are_unique(self) -> bool:
        """Whether every row has a key of its own. In the checksum, two rows with the same key would cancel each other
        out."""
        rows = contract.rows(self._rule)
        table, key = self._ours.table_of(rows), sql.expression(self._rule.key)
        if self._ours.is_unique(rows):
            return True
        where = sql.where([*sql.conditions(rows, None), *self._inside(sql.expression(self._rule.time))])
        counted = self._ours.attempt(
            f"SELECT count(*) = count(DISTINCT ({key})::text) FROM {table}{where}", about="the keys"
        )
        return bool(counted[0][0])

    def _rows(self) -> _Buckets:
        rule, time = self._rule, sql.expression(self._rule.time)
        fields = [f"{sql.expression(item.column)} AS f{number}" for number, item in enumerate(rule.fields)]
        where = sql.where([*sql.conditions(contract.rows(rule), None), *self._inside(time)])
        read = sql.step(
            [f"{time}::timestamptz AS at", f"{sql.expression(rule.key)}::text AS key", *fields],
            f"{self._ours.table_of(contract.rows(rule))}{where}",
        )
        hashed = sql.step(
            ["at", f"{self._content(values.normal)} AS content", f"{values.hashed(['key'])} AS key"], f"({read}) source"
        )
        return self._sums(self._ours, "count(*), bit_xor(content), bit_xor(key)", hashed)

    def _messages(self) -> _Buckets:
        rule, selection = self._rule, contract.messages(self._rule)
        topic = self._topic()
        known = ["key", "state", "content_type", "decided_at", "stored_at", "deliver_at"]
        # CASE parses the bodies of the rule's topic only, because the bodies of other topics may have other formats.
        terms = [topic, "state <> 'rolled_back'"]
        if self._window.since is not None:
            # As in the scan of an incremental run: a message is hardly older than its row's time. If it is, its bucket
            # differs, and the run reads this bucket.
            terms.append(f"stored_at >= {sql.moment(self._window.since - margin(rule))}")
        parsed = sql.step(
            [*known, f"CASE WHEN {topic} THEN convert_from(body, 'UTF8')::jsonb END AS document"],
            f"{self._broker.table_of(selection)}{sql.where(terms)}",
        )
        fields = {f"f{number}": values.body_value(item) for number, item in enumerate(rule.fields)}
        fields |= {
            f"kind{n}": values.body_kind(item) for n, item in enumerate(rule.fields) if item.type is FieldType.TEXT
        }
        split = sql.step([*known, *(f"{value} AS {name}" for name, value in fields.items())], f"({parsed}) parsed")
        # The text of the row's time is cast once, and used in three places: a cast takes as much CPU as the hash.
        timed = rule.fields.index(self._timed)
        read = sql.step([*known, *fields, f"f{timed}::timestamptz AS at"], f"({split}) split")
        # Also count a message that was stored in the window but whose body has a time outside of the window, because
        # the row of the message may be older than the window, or missing.
        inside = f"at IS NULL OR ({' AND '.join(self._inside('at'))}) OR ({' AND '.join(self._inside('stored_at'))})"
        hashed = sql.step(
            [
                "at",
                f"{self._content(values.normal_body)} AS content",
                "state IN ('committed', 'recalled') AS is_sent",
                f"{self._unusual()} AS is_unusual",
                f"{inside} AS is_inside",
            ],
            f"({read}) source",
        )
        sums = (
            "count(*) FILTER (WHERE is_inside AND is_sent), bit_xor(content) FILTER (WHERE is_inside AND is_sent), "
            "count(*) FILTER (WHERE is_inside AND is_unusual)"
        )
        return self._sums(self._broker, sums, hashed, " HAVING bool_or(is_inside)")

    def _content(self, normal: Callable[[str, FieldRule], str]) -> str:
        """The hash of the key and the compared fields f0, f1, … A row and its message have the same hash.

        Both sides have the row's time as `at`, and PostgreSQL writes it in half of the time that to_char takes.
        """
        fields = enumerate(self._rule.fields)
        forms = ["at::text" if item is self._timed else normal(f"f{number}", item) for number, item in fields]
        return values.hashed(["key", *forms])

    def _topic(self) -> str:
        return " AND ".join(f"{sql.name(n)} = {sql.text(v)}" for n, v in contract.messages(self._rule).equals)

    def _unusual(self) -> str:
        """A condition for messages that Spark must read, because their state or form is unusual, or because they are
        late or delayed."""
        terms = "state <> 'committed' OR coalesce(content_type, '') NOT LIKE 'application/json%'"
        if self._rule.groups:
            # The effects of a delayed message may be too early, although they are younger than its row.
            terms += f" OR coalesce(deliver_at - at > {_interval(self._rule.grace_seconds)}, false)"
        for number, item in enumerate(self._rule.fields):
            if item.type is FieldType.TEXT:
                terms += f" OR {values.is_no_text(f'f{number}', f'kind{number}')}"
            terms += values.unusual(f"f{number}", item)
        if self._rule.late_after_seconds is not None:
            terms += f" OR decided_at - at > {_interval(self._rule.late_after_seconds)}"
        return terms

    def _effects(self, number: int) -> _Buckets:
        rule, group, selection = self._rule, self._rule.groups[number], contract.effects(self._rule, number)
        mine, theirs = contract.rows(rule), selection
        same = self._ours.column_types(mine).get(rule.key) == self._ours.column_types(theirs).get(group.key or "")
        suffix = "" if same else "::text"
        late = (
            f"e.effect_time - r.row_time > {_interval(group.within_seconds)} "
            f"OR r.row_time - e.effect_time > {_interval(rule.grace_seconds)}"
        )
        rows_where = sql.where(sql.conditions(mine, None))
        effects_where = sql.where(sql.conditions(theirs, self._window.since))
        inside = f"({' AND '.join(self._inside('r.row_time'))})"
        if self._window.since is not None:
            # Such a row is in no bucket of the window, so its bucket will differ, and the row is read.
            inside += f" OR r.row_time < {sql.moment(self._window.since)}"
        joined = sql.step(
            ["r.row_time AS at", f"{values.hashed(['e.effect_key::text'])} AS key", f"{late} AS is_late"],
            f"(SELECT {sql.expression(group.key or '')} AS effect_key, "
            f"{sql.expression(group.time or '')}::timestamptz AS effect_time "
            f"FROM {self._ours.table_of(theirs)}{effects_where}) e "
            f"LEFT JOIN (SELECT {sql.expression(rule.key)} AS row_key, "
            f"{sql.expression(rule.time)}::timestamptz AS row_time FROM {self._ours.table_of(mine)}{rows_where}) r "
            f"ON r.row_key{suffix} = e.effect_key{suffix} WHERE r.row_time IS NULL OR {inside}",
        )
        return self._sums(self._ours, "count(*), bit_xor(key), count(*) FILTER (WHERE is_late)", joined)

    def _dead(self) -> set[int | None]:
        """The buckets that contain a row with a dead letter."""
        if not self._rule.groups:
            return set()
        selection, mine = contract.dead_letters(self._rule), contract.rows(self._rule)
        where = sql.where(sql.conditions(selection, None))
        listed = f"SELECT coalesce(key, '') FROM {self._broker.table_of(selection)}{where}"
        keys = [str(row[0]) for row in self._broker.attempt(listed, about="the dead letters")]
        key_type = self._ours.column_types(mine).get(self._rule.key)
        condition = sql.keys_condition(self._rule.key, key_type, keys)
        where = sql.where([*sql.conditions(mine, None), condition])
        time = sql.expression(self._rule.time)
        read = f"SELECT {time}::timestamptz AS at FROM {self._ours.table_of(mine)}{where}"
        return set(self._sums(self._ours, "count(*)", read))

    def _limits(self, buckets: set[int]) -> ReadLimits:
        rule = self._rule
        if not buckets:
            return ReadLimits(is_nothing=True)
        ranges = _ranges(buckets)
        rows = self._within(sql.expression(rule.time), ranges)
        topic = self._topic()
        time = values.body_value(self._timed, "convert_from(body, 'UTF8')::jsonb")
        messages = self._within(f"(CASE WHEN {topic} THEN ({time})::timestamptz END)", ranges)
        where = sql.where([*sql.conditions(contract.rows(rule), None), rows])
        table = self._ours.table_of(contract.rows(rule))
        keys = f"(SELECT {sql.expression(rule.key)}::text FROM {table}{where})"
        effects = tuple((f"{sql.expression(group.key or '')}::text IN {keys}",) for group in rule.groups)
        return ReadLimits((rows,), (messages,), effects)

    def _within(self, time: str, ranges: list[tuple[int, int]]) -> str:
        parts = []
        for first, last in ranges:
            low, high = (f"to_timestamp({edge * self._width}::numeric / 1000000)" for edge in (first, last + 1))
            parts.append(f"({time} >= {low} AND {time} < {high})")
        return f"({' OR '.join(parts)})"

    def _inside(self, time: str) -> list[str]:
        terms = [f"{time} < {sql.moment(self._window.until)}"]
        if self._window.since is not None:
            terms.append(f"{time} >= {sql.moment(self._window.since)}")
        return terms

    def _bucket(self, time: str) -> str:
        """The start of the bucket that contains `time`. The first bucket begins with the year 1970, in UTC."""
        return f"date_bin('{self._width} microseconds', {time}, 'epoch')"

    def _sums(self, source: PostgresSource, sums: str, hashed: str, having: str = "") -> _Buckets:
        number = f"(extract(epoch FROM {self._bucket('at')}) * 1000000 / {self._width})::bigint"
        statement = f"SELECT {number}, {sums} FROM ({hashed}) hashed GROUP BY {self._bucket('at')}{having}"
        rows = source.attempt(statement, about="the checksums")
        return {row[0]: tuple(int(value or 0) for value in row[1:]) for row in rows}


def _interval(seconds: float) -> str:
    return f"interval '{round(seconds * 1_000_000)} microseconds'"


def _ranges(buckets: set[int]) -> list[tuple[int, int]]:
    """The first and the last bucket of each row of buckets without a gap."""
    rows = groupby(enumerate(sorted(buckets)), lambda numbered: numbered[1] - numbered[0])
    listed = ([bucket for _, bucket in row] for _, row in rows)
    return [(row[0], row[-1]) for row in listed]
