"""The checksum pre-filter: buckets of time in which both sides add up are not read.

Rows, message bodies and effects are hashed by their own databases, per bucket of the row's time (which the body must
carry too). Equal counts and equal checksums in a bucket mean that every row has its message with the declared fields
and its effects; buckets that differ are read and classified as always. What cannot be summed up in SQL is said in
the outcome's note, and everything is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from . import contract
from .classify import Window
from .errors import ReconcileError
from .rules import FieldRule, FieldType, Kind, Messages, Rule, Rules
from .sides import Limits, Sources
from .sources import sql
from .sources.postgres import PostgresSource

_FIELD_END: Final = "E'\\x1f'"
_NULL: Final = "E'\\x1e'"
_NOTHING: Final = ("false",)
_UNIQUE: Final = """
SELECT 1 FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
WHERE i.indrelid = to_regclass({table}) AND i.indisunique AND i.indisvalid AND i.indimmediate AND i.indnkeyatts = 1
  AND i.indpred IS NULL AND a.attname = {column} AND a.attnotnull
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`skipped_rows` are proven equal; `limits` is what remains to be read."""

    note: str
    skipped_rows: int = 0
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class _Buckets:
    """Checksums per bucket of one side; None as a bucket: rows that belong to no bucket."""

    sums: dict[int | None, tuple[Any, ...]]


def compare(rule: Rule, rules: Rules, sources: Sources, window: Window) -> Outcome:
    """Which buckets of the window are equal on all sides, and conditions that select the others."""
    reason = _inapplicable(rule, rules, sources)
    if reason is not None:
        return Outcome(f"checksum: not used, {reason}")
    ours, broker = sources[rule.database], sources.broker
    assert isinstance(ours, PostgresSource) and isinstance(broker, PostgresSource)
    filter_ = _Prefilter(rule, ours, broker, window)
    try:
        return filter_.outcome()
    except ReconcileError as error:
        return Outcome(f"checksum: not used, the database could not compute it ({' '.join(str(error).split())[:200]})")


def _inapplicable(rule: Rule, rules: Rules, sources: Sources) -> str | None:
    if any(rules.databases[name].kind is not Kind.POSTGRES for name in (rule.database, rules.broker)):
        return "both sides must be PostgreSQL"
    if rule.messages is not Messages.EXACTLY_ONE:
        return "it needs messages = 'exactly_one'"
    for group in rule.groups:
        if group.table is None or group.key is None:
            return f"the effects of {group.name!r} are not found by key"
        if sources[group.database] is not sources[rule.database]:
            return f"the effects of {group.name!r} are in another database than the rows"
    return None


class _Prefilter:
    def __init__(self, rule: Rule, ours: PostgresSource, broker: PostgresSource, window: Window) -> None:
        self._rule, self._ours, self._broker, self._window = rule, ours, broker, window
        self._width = max(1, round((rule.bucket_seconds or 0) * 1_000_000))
        timed = next(item for item in rule.fields if item.column == rule.time)
        self._body_time = f"({_body_value(timed)})::timestamptz"

    def outcome(self) -> Outcome:
        if not self._keys_are_unique():
            return Outcome("checksum: not used, two rows have one key, or a row has none")
        rows, messages = self._rows(), self._messages()
        effects = [self._effects(number) for number in range(len(self._rule.groups))]
        if None in messages.sums or any(None in side.sums for side in effects):
            return Outcome("checksum: not used, messages or effects are there that belong to no row's bucket")
        suspicious = {bucket for bucket, sums in messages.sums.items() if sums[2]} | self._dead()
        for bucket in set(rows.sums) | set(messages.sums):
            if rows.sums.get(bucket, (0, 0, 0))[:2] != messages.sums.get(bucket, (0, 0, 0))[:2]:
                suspicious.add(bucket)
        for side in effects:
            for bucket in set(rows.sums) | set(side.sums):
                count, _, keys = rows.sums.get(bucket, (0, 0, 0))
                if (count, keys, 0) != side.sums.get(bucket, (0, 0, 0)):
                    suspicious.add(bucket)
        skipped = sum(sums[0] for bucket, sums in rows.sums.items() if bucket not in suspicious)
        known = len(set(rows.sums) | set(messages.sums))
        note = f"checksum: {known - len(suspicious)} of {known} buckets are equal, {skipped} rows were not read"
        return Outcome(note, skipped, self._limits({bucket for bucket in suspicious if bucket is not None}))

    def _keys_are_unique(self) -> bool:
        """Otherwise two rows and two messages of one key would cancel each other out."""
        rows = contract.rows(self._rule)
        table, key = self._ours.table_of(rows), sql.expression(self._rule.key)
        if sql.is_column(self._rule.key) and self._ours.attempt(
            _UNIQUE.format(table=sql.text(table), column=sql.text(self._rule.key)), about="the indexes"
        ):
            return True
        where = sql.where([*sql.conditions(rows, None), *self._inside(sql.expression(self._rule.time))])
        counted = self._ours.attempt(
            f"SELECT count(*) = count(DISTINCT ({key})::text) FROM {table}{where}", about="the keys"
        )
        return bool(counted[0][0])

    def _rows(self) -> _Buckets:
        rule, time = self._rule, sql.expression(self._rule.time)
        key = f"{sql.expression(rule.key)}::text"
        values = [key, *(_normal(sql.expression(item.column), item) for item in rule.fields)]
        where = sql.where([*sql.conditions(contract.rows(rule), None), *self._inside(time)])
        return self._sums(
            self._ours,
            f"SELECT {self._bucket(time)}, count(*), bit_xor({_hash(values)}), bit_xor({_hash([key])}) "
            f"FROM {self._ours.table_of(contract.rows(rule))}{where} GROUP BY 1",
        )

    def _messages(self) -> _Buckets:
        rule, selection = self._rule, contract.messages(self._rule)
        values = ['"key"', *(_normal(f"({_body_value(item)})", item) for item in rule.fields)]
        time = self._body_time
        sent = "state IN ('committed', 'recalled')"
        odd = "state <> 'committed' OR coalesce(content_type, '') NOT LIKE 'application/json%'"
        odd += "".join(f" OR {_is_no_text(item)}" for item in rule.fields if item.type is FieldType.TEXT)
        if rule.late_after_seconds is not None:
            odd += f" OR {_micros('decided_at')} - {_micros(time)} > {round(rule.late_after_seconds * 1_000_000)}"
        topic = " AND ".join(f"{sql.name(name)} = {sql.text(value)}" for name, value in selection.equals)
        # Also those stored in the window whose body says another time: they may be of no row, or of an older one.
        stored = " AND ".join(self._inside("stored_at"))
        inside = f"({time} IS NULL OR ({' AND '.join(self._inside(time))}) OR ({stored}))"
        # The body is parsed only where CASE has seen the topic: other topics may carry other formats.
        return self._sums(
            self._broker,
            f"SELECT {self._bucket(time)}, count(*) FILTER (WHERE {sent}), "
            f"bit_xor({_hash(values)}) FILTER (WHERE {sent}), "
            f"count(*) FILTER (WHERE {odd}) "
            f"FROM (SELECT m.*, CASE WHEN {topic} THEN convert_from(m.body, 'UTF8')::jsonb END AS document "
            f"FROM {self._broker.table_of(selection)} m WHERE {topic} OFFSET 0) parsed "
            f"WHERE state <> 'rolled_back' AND {inside} GROUP BY 1",
        )

    def _effects(self, number: int) -> _Buckets:
        rule, group, selection = self._rule, self._rule.groups[number], contract.effects(self._rule, number)
        mine, theirs = contract.rows(rule), selection
        same = self._ours.column_types(mine).get(rule.key) == self._ours.column_types(theirs).get(group.key or "")
        suffix = "" if same else "::text"
        time, effect_time = "r.row_time", f"e.{sql.name('effect_time')}"
        late = f"{_micros(effect_time)} - {_micros(time)} > {round(group.within_seconds * 1_000_000)}"
        rows_where = sql.where(sql.conditions(mine, None))
        effects_where = sql.where(sql.conditions(theirs, self._window.since))
        inside = " AND ".join(self._inside(time)) or "true"
        return self._sums(
            self._ours,
            f"SELECT {self._bucket(time)}, count(*), bit_xor({_hash(['e.effect_key::text'])}), "
            f"count(*) FILTER (WHERE {late}) "
            f"FROM (SELECT {sql.expression(group.key or '')} AS effect_key, "
            f"{sql.expression(group.time or '')}::timestamptz AS effect_time "
            f"FROM {self._ours.table_of(theirs)}{effects_where}) e "
            f"LEFT JOIN (SELECT {sql.expression(rule.key)} AS row_key, "
            f"{sql.expression(rule.time)}::timestamptz AS row_time FROM {self._ours.table_of(mine)}{rows_where}) r "
            f"ON r.row_key{suffix} = e.effect_key{suffix} "
            f"WHERE {time} IS NULL OR ({inside}) GROUP BY 1",
        )

    def _dead(self) -> set[int | None]:
        """Buckets of rows with a dead letter."""
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
        rows = self._ours.attempt(
            f"SELECT DISTINCT {self._bucket(time)} FROM {self._ours.table_of(mine)}{where}", about="the checksums"
        )
        return {int(row[0]) for row in rows}

    def _limits(self, buckets: set[int]) -> Limits:
        rule = self._rule
        if not buckets:
            return Limits(_NOTHING, _NOTHING, tuple(_NOTHING for _ in rule.groups))
        ranges = _ranges(buckets)
        rows = self._within(sql.expression(rule.time), ranges)
        topic = " AND ".join(f"{sql.name(n)} = {sql.text(v)}" for n, v in contract.messages(rule).equals)
        time = self._body_time.replace("document", "convert_from(body, 'UTF8')::jsonb")
        messages = self._within(f"(CASE WHEN {topic} THEN {time} END)", ranges)
        where = sql.where([*sql.conditions(contract.rows(rule), None), rows])
        table = self._ours.table_of(contract.rows(rule))
        keys = f"(SELECT {sql.expression(rule.key)}::text FROM {table}{where})"
        effects = tuple((f"{sql.expression(group.key or '')}::text IN {keys}",) for group in rule.groups)
        return Limits((rows,), (messages,), effects)

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
        return f"floor({_micros(time)}::numeric / {self._width})::bigint"

    @staticmethod
    def _sums(source: PostgresSource, statement: str) -> _Buckets:
        rows = source.attempt(statement, about="the checksums")
        return _Buckets({row[0]: tuple(int(value or 0) for value in row[1:]) for row in rows})


def _micros(time: str) -> str:
    return f"(extract(epoch FROM {time}) * 1000000)::bigint"


def _hash(values: list[str]) -> str:
    joined = f" || {_FIELD_END} || ".join(f"coalesce({value}, {_NULL})" for value in values)
    return f"hashtextextended({joined}, 0)"


def _body_value(item: FieldRule) -> str:
    path = ", ".join(sql.text(part) for part in item.body.split("."))
    return f"jsonb_extract_path_text(document, {path})"


def _is_no_text(item: FieldRule) -> str:
    """Values that PostgreSQL and Spark may write differently as a text: 12.50 or 12.5, {"a": 1} or {"a":1}."""
    path = ", ".join(sql.text(part) for part in item.body.split("."))
    kind = f"jsonb_typeof(jsonb_extract_path(document, {path}))"
    whole = f"{_body_value(item)} ~ '^-?[0-9]{{1,15}}$'"
    return f"coalesce({kind} IN ('object', 'array') OR ({kind} = 'number' AND NOT {whole}), false)"


def _normal(value: str, item: FieldRule) -> str:
    """The SQL twin of evidence's normal form."""
    if item.type in (FieldType.INTEGER, FieldType.DECIMAL):
        return f"trim_scale(round({value}::numeric, 12))::text"
    if item.type is FieldType.BOOLEAN:
        return f"({value}::boolean)::text"
    if item.type is FieldType.DATE:
        return f"({value}::date)::text"
    if item.type is FieldType.TIMESTAMP:
        return f"{_micros(f'{value}::timestamptz')}::text"
    if item.type is FieldType.UUID:
        return f"lower({value}::text)"
    return f"{value}::text"


def _ranges(buckets: set[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for bucket in sorted(buckets):
        if found and found[-1][1] == bucket - 1:
            found[-1] = (found[-1][0], bucket)
        else:
            found.append((bucket, bucket))
    return found
