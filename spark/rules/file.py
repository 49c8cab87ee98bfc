"""Reads and validates the rules file, and reports all its errors at once, each with its key and remedy."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, time
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeVar

from ..common.errors import RulesInvalid, UsageProblem
from ..common.options import parse_duration
from .rule import (
    FAULTS,
    Acknowledgement,
    DatabaseRule,
    FieldRule,
    FieldType,
    FindingClass,
    FindingSeverity,
    GroupRule,
    Messages,
    Rule,
    Rules,
    SourceKind,
    Tolerance,
)

_PASSWORD: Final = re.compile(r"password\s*=|://[^/@:]*:[^/@]+@", re.IGNORECASE)
_LOCATIONS: Final = ("env", "dsn", "path", "namespace")
Choice = TypeVar("Choice", bound=StrEnum)


def load(path: Path, environment: Mapping[str, str] | None = None, *, is_connected: bool = True) -> Rules:
    """The rules in the file `path`. Raises RulesInvalid with all errors, or UsageProblem if the file does not exist.

    With `is_connected=False`, the caller reads no database, so a variable of `env = …` may be missing.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageProblem(
            f"the rules file {path} cannot be read: {error}. Give the path of the rules file with --rules."
        ) from error
    return parse(text, str(path), environment, is_connected=is_connected)


def parse(
    text: str, path: str = "rules", environment: Mapping[str, str] | None = None, *, is_connected: bool = True
) -> Rules:
    """The rules in `text`. The variables of `env = …` are looked up in `environment` (default: os.environ)."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RulesInvalid(path, [f"not valid TOML: {error}. Correct the syntax."]) from error
    reader = _Reader(os.environ if environment is None else environment, is_connected)
    rules = reader.read(document)
    if reader.problems:
        raise RulesInvalid(path, reader.problems)
    return rules


class _Reader:
    def __init__(self, environment: Mapping[str, str], is_connected: bool) -> None:
        self._environment, self._is_connected = environment, is_connected
        self.problems: list[str] = []

    def read(self, document: dict[str, Any]) -> Rules:
        keys = ("version", "title", "database", "broker", "output", "rule", "acknowledge")
        top = TomlTable(self.problems, document, "", keys)
        if document.get("version") != 1:
            top.problem("version", f"must be 1, got {document.get('version')!r}", "write version = 1")
        databases = self._databases(document.get("database", {}))
        broker = TomlTable(self.problems, document.get("broker", {}), "broker", ("database", "archive"))
        broker_name = broker.required("database")
        self._known(broker, "database", broker_name, databases)
        rules = tuple(self._rule(value, path, databases) for value, path in top.tables("rule"))
        if not rules:
            top.problem("rule", "no rule", "add at least one [[rule]]")
        names = [rule.name for rule in rules]
        self._unique(names, "rule")
        known = [
            _acknowledgement(TomlTable(self.problems, value, path, _ACKNOWLEDGE_KEYS), names)
            for value, path in top.tables("acknowledge")
        ]
        output = TomlTable(self.problems, document.get("output", {}), "output", ("fail_above",))
        return Rules(
            title=top.text("title") or "Reconciliation",
            databases=databases,
            broker=broker_name,
            rules=rules,
            archive=broker.text("archive"),
            fail_above=self._fail_above(output),
            acknowledged=tuple(known),
        )

    @staticmethod
    def _fail_above(table: TomlTable) -> Tolerance:
        given = table.values.get("fail_above", 0)
        share = re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?) ?%", given) if isinstance(given, str) else None
        if share is not None and float(share[1]) <= 100:
            return Tolerance(float(share[1]) / 100, is_share=True)
        if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
            return Tolerance(given)
        text = f"must be a number of findings, or a share of the judged keys, got {given!r}"
        table.problem("fail_above", text, 'write fail_above = 10 or fail_above = "0.1 %"')
        return Tolerance()

    def _databases(self, values: Any) -> dict[str, DatabaseRule]:
        section = TomlTable(self.problems, values, "database", tuple(values) if isinstance(values, dict) else ())
        if not section.values:
            section.problem(None, "no database", "add [database.app] and [database.broker]")
        return {name: self._database(name, value) for name, value in section.values.items()}

    def _database(self, name: str, value: Any) -> DatabaseRule:
        keys = ("kind", *_LOCATIONS, "schema", "watermark", "longest_transaction")
        table = TomlTable(self.problems, value, f"database.{name}", keys)
        kind = table.choice("kind", SourceKind, SourceKind.POSTGRES)
        given = [key for key in _LOCATIONS if key in table.values]
        if len(given) != 1:
            table.problem(None, f"needs exactly one of {', '.join(_LOCATIONS)}", 'write env = "RECONCILE_APP"')
        return DatabaseRule(
            name=name,
            kind=kind,
            location=self._location(table, kind, given[0]) if given else "",
            schema=table.text("schema") or "public",
            watermark=table.text("watermark"),
            **table.spans("longest_transaction"),
        )

    def _location(self, table: TomlTable, kind: SourceKind, given: str) -> str:
        value = table.text(given) or ""
        places = {SourceKind.POSTGRES: "dsn", SourceKind.CATALOG: "namespace"}
        if given not in ("env", places.get(kind, "path")):
            table.problem(
                given,
                f"does not fit kind {kind.value!r}",
                "write path for parquet, csv, delta, iceberg and archive, namespace for a catalog, and env or dsn for "
                "a database",
            )
        if given == "dsn" and _PASSWORD.search(value):
            table.problem(
                given,
                "contains a password",
                "keep the password in the environment (env), a libpq service file (service=…) or ~/.pgpass",
            )
        if given == "env":
            if self._is_connected and value not in self._environment:
                table.problem(given, f"the environment variable {value!r} is not set", f"export {value}=postgresql://…")
            return self._environment.get(value, "")
        return value

    def _rule(self, value: Any, path: str, databases: dict[str, DatabaseRule]) -> Rule:
        keys = ("name", "database", "table", "key", "when", "time", "topic", "tag", "messages", "severity", "grace")
        more = ("message_when", "late_after", "stuck_after", "bucket", "allow_empty", "mask", "field", "group")
        again = ("look_back", "look_back_every", "fail_above")
        table = TomlTable(self.problems, value, path, (*keys, *more, *again))
        database = table.required("database")
        self._known(table, "database", database, databases)
        severity = table.choice("severity", FindingSeverity, FindingSeverity.CRITICAL)
        fields = tuple(self._field(item, at) for item, at in table.tables("field"))
        groups = [self._group(item, at, databases, database, severity, fields) for item, at in table.tables("group")]
        self._unique([group.name for group in groups], f"{path}.group")
        rule = Rule(
            name=table.required("name"),
            database=database,
            table=table.required("table"),
            key=table.required("key"),
            when=table.text("when"),
            time=table.required("time"),
            topic=table.required("topic"),
            tag=table.text("tag"),
            message_when=table.text("message_when"),
            messages=table.choice("messages", Messages, Messages.EXACTLY_ONE),
            severity=severity,
            **self._spans(table),
            allow_empty=table.flag("allow_empty"),
            fields=fields,
            groups=tuple(groups),
            mask=self._mask(table),
            fail_above=self._fail_above(table) if "fail_above" in table.values else None,
            digest=_digest(value),
        )
        if rule.bucket_seconds == 0:
            table.problem("bucket", "must be longer than 0", 'write bucket = "1h", or remove it')
        if not rule.look_back_seconds and "look_back_every" in table.values:
            table.problem("look_back_every", "has no meaning without look_back", 'add look_back = "7d", or remove it')
        for group in rule.groups if rule.has_several_messages else ():
            if group.compare_effect or group.sum_effect:
                text = f"with at_least_one, the effects of group {group.name!r} have no single message to compare"
                table.problem("messages", text, "remove compare_effect and sum_effect, or messages")
        for group in rule.groups if rule.message_when else ():
            if group.table is None:
                text = f"cannot be used for group {group.name!r}, which a run judges by all deliveries of the broker"
                table.problem("message_when", text, "name the effect table of the group")
        return rule

    @staticmethod
    def _spans(table: TomlTable) -> dict[str, Any]:
        """Return the durations of a rule. Its own look back is not made with each run: `prepare` chooses how often."""
        given = table.spans("grace", "late_after", "stuck_after", "bucket", "look_back", "look_back_every")
        if "look_back" in table.values:
            given.setdefault("look_back_every_seconds", None)
        return given

    @staticmethod
    def _mask(table: TomlTable) -> tuple[str, ...]:
        names = table.values.get("mask", [])
        if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
            table.problem("mask", f"must be a list of names, got {names!r}", 'write mask = ["email"]')
            return ()
        if table.values.get("key") in names:
            table.problem("mask", "the key cannot be masked, because findings show it", "remove the key from mask")
        return tuple(names)

    def _field(self, value: Any, path: str) -> FieldRule:
        table = TomlTable(self.problems, value, path, ("column", "body", "type", "tolerance"))
        column = table.required("column")
        given = table.values.get("body", column)
        names = given if isinstance(given, list) else [given]
        if not names or not all(isinstance(name, str) and name for name in names):
            table.problem("body", f"must be a name, or a list of names, got {given!r}", f'write body = "{column}"')
            names = [column]
        kind = table.choice("type", FieldType, FieldType.TEXT)
        body, *former = names
        return FieldRule(
            column=column, body=body, former=tuple(former), type=kind, tolerance=self._tolerance(table, kind)
        )

    @staticmethod
    def _tolerance(table: TomlTable, kind: FieldType) -> str | None:
        value = table.values.get("tolerance")
        if value is None:
            return None
        # Two values of the other types have no distance.
        if kind not in (FieldType.INTEGER, FieldType.DECIMAL, FieldType.TIMESTAMP):
            table.problem("tolerance", f"a {kind.value} has none", "remove it, or use integer, decimal or timestamp")
            return None
        if kind is FieldType.TIMESTAMP and isinstance(value, str):
            return str(table.seconds("tolerance") or 0)
        try:
            tolerance = Decimal(str(value))
        except InvalidOperation:
            tolerance = Decimal(-1)
        if isinstance(value, bool) or not tolerance.is_finite() or tolerance < 0:
            table.problem("tolerance", f"not a distance: {value!r}", 'write tolerance = "0.01"')
            return None
        return str(tolerance)

    def _group(
        self,
        value: Any,
        path: str,
        databases: dict[str, DatabaseRule],
        default: str,
        severity: FindingSeverity,
        fields: Sequence[FieldRule],
    ) -> GroupRule:
        keys = ("name", "database", "table", "key", "message_id", "time", "when", "owed_when", "within", "severity")
        table = TomlTable(self.problems, value, path, (*keys, "compare_effect", "sum_effect"))
        database = table.text("database") or default
        self._known(table, "database", database, databases)
        effect = table.text("table")
        if effect and ("key" in table.values) == ("message_id" in table.values):
            table.problem("table", "needs exactly one of key, message_id", 'write key = "order_id"')
        if effect and "time" not in table.values:
            table.problem("time", "missing", 'name the column that says when the effect happened: time = "created_at"')
        if not effect:
            for key in ("key", "message_id", "time", "when", "compare_effect", "sum_effect"):
                if key in table.values:
                    table.problem(key, "has no meaning without an effect table", 'add table = "…" or remove it')
        return GroupRule(
            name=table.required("name"),
            database=database,
            table=effect,
            key=table.text("key"),
            message_id=table.text("message_id"),
            time=table.text("time"),
            when=table.text("when"),
            owed_when=table.text("owed_when"),
            compare_effect=self._of_effect(table, "compare_effect", fields),
            sum_effect=self._of_effect(table, "sum_effect", fields),
            **table.spans("within"),
            severity=table.choice("severity", FindingSeverity, severity),
        )

    @staticmethod
    def _of_effect(table: TomlTable, key: str, fields: Sequence[FieldRule]) -> tuple[tuple[str, int], ...]:
        """Read the columns of an effect table by the fields of the body, which the rule must compare too: so each field
        has its type."""
        given = table.values.get(key, {})
        if not isinstance(given, dict) or not all(isinstance(body, str) for body in given.values()):
            table.problem(key, f"must be a table, got {given!r}", f'write {key} = {{amount = "amount"}}')
            return ()
        known = {field.body: place for place, field in enumerate(fields)}
        read: list[tuple[str, int]] = []
        for column, body in given.items():
            if body not in known:
                table.problem(
                    key, f"no [[rule.field]] compares the field {body!r} of the body", f'add one with body = "{body}"'
                )
            elif key == "sum_effect" and fields[known[body]].type not in (FieldType.INTEGER, FieldType.DECIMAL):
                table.problem(key, f"the field {body!r} is no number", 'write type = "decimal" in its [[rule.field]]')
            elif known[body] in (place for _, place in read) or body in (
                table.values.get("compare_effect", {}).values() if key == "sum_effect" else ()
            ):
                table.problem(key, f"the field {body!r} is compared twice", "compare it with one column")
            else:
                read.append((column, known[body]))
        return tuple(read)

    @staticmethod
    def _known(table: TomlTable, key: str, name: str, databases: dict[str, DatabaseRule]) -> None:
        if name and name not in databases:
            known = ", ".join(sorted(databases)) or "none"
            table.problem(key, f"no database {name!r}", f"add [database.{name}] or use one of: {known}")

    def _unique(self, names: list[str], path: str) -> None:
        for number, name in enumerate(names):
            if name and name in names[:number]:
                self.problems.append(f"{path}: two are called {name!r}; rename one.")


_NOT_JUDGED: Final = ("mask", "look_back", "look_back_every", "fail_above")


def _digest(rule: Any) -> str:
    """A digest of a rule without the options of _NOT_JUDGED, which do not change the class of any subject."""
    judged = {key: value for key, value in rule.items() if key not in _NOT_JUDGED} if isinstance(rule, dict) else rule
    return hashlib.sha256(json.dumps(judged, sort_keys=True, default=str).encode()).hexdigest()[:16]


_ACKNOWLEDGE_KEYS: Final = ("rule", "key", "group", "class", "until", "reason", "by")


def _acknowledgement(table: TomlTable, rules: Sequence[str]) -> Acknowledgement:
    """Read one table `[[acknowledge]]`; `rules` has the names of all rules of the file."""
    rule, until = table.required("rule"), table.values.get("until")
    if rule and rule not in rules:
        table.problem("rule", f"no rule {rule!r}", f"use one of: {', '.join(rules)}")
    # Both may be empty: a row whose key is null has the key '', and a finding about the message has the group ''.
    key, group = (table.values.get(name) for name in ("key", "group"))
    for name, value in (("key", key), ("group", group)):
        if value is not None and not isinstance(value, str):
            table.problem(name, f"must be a text, got {value!r}", f'write {name} = "…"')
    for name, example in (("key", "4711"), ("class", "LATE")):
        if name not in table.values:
            table.problem(name, "missing", f'write {name} = "{example}"')
    moment = _end_of(until)
    if moment is None:
        problem = "missing" if until is None else f"not a date: {until!r}"
        table.problem("until", problem, "write until = 2025-12-31 (to the end of that day, UTC)")
    return Acknowledgement(
        rule=rule,
        key=key if isinstance(key, str) else "",
        finding_class=table.choice("class", FAULTS, FindingClass.LATE).value,
        group=group if isinstance(group, str) else None,
        until=moment or datetime.min.replace(tzinfo=UTC),
        reason=table.required("reason"),
        by=table.required("by"),
    )


def _end_of(value: object) -> datetime | None:
    if isinstance(value, datetime):
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value
    if isinstance(value, date):
        return datetime.combine(value, time.max, UTC)
    return None


class TomlTable:
    """Reads typed values from a table of TOML, and reports each error with the path of its key."""

    def __init__(self, problems: list[str], values: Any, path: str, allowed: tuple[str, ...]) -> None:
        """`problems` gets the errors. `path` is the path of the table; '' for the file."""
        self._problems, self._path = problems, path
        self.values: dict[str, Any] = values if isinstance(values, dict) else {}
        if not isinstance(values, dict):
            self.problem(None, "must be a table", "write it as [section] or [[section]]")
        for key in self.values:
            if key not in allowed:
                near = difflib.get_close_matches(key, allowed, 1)
                remedy = f"did you mean {near[0]!r}?" if near else f"use one of: {', '.join(allowed)}"
                self.problem(key, "unknown key", remedy)

    def problem(self, key: str | None, what: str, remedy: str) -> None:
        """Report an error at a key of this table, or at the table itself if `key` is None."""
        self._problems.append(f"{self._at(key) or 'file'}: {what}; {remedy}{'' if remedy.endswith('?') else '.'}")

    def _at(self, key: str | None) -> str:
        return ".".join(filter(None, (self._path, key)))

    def text(self, key: str) -> str | None:
        """The text of a key, which must not be empty; None if the key is missing."""
        value: object = self.values.get(key)
        if value is None or (isinstance(value, str) and value.strip()):
            return value
        self.problem(key, f"must be a text that is not empty, got {value!r}", f'write {key} = "…"')
        return None

    def required(self, key: str) -> str:
        """The text of a required key. If the key is missing, report an error and return ''."""
        if key not in self.values:
            self.problem(key, "missing", f'add {key} = "…"')
        return self.text(key) or ""

    def flag(self, key: str) -> bool:
        """The boolean value of a key; false if the key is missing."""
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            self.problem(key, f"must be true or false, got {value!r}", f"write {key} = true")
            return False
        return value

    def choice(self, key: str, choices: Iterable[Choice], default: Choice) -> Choice:
        """The value of a key as one of `choices`, which may be a whole enumeration."""
        value = self.values.get(key, default.value)
        for choice in choices:
            if choice == value:
                return choice
        self.problem(key, f"unknown value {value!r}", f"use one of: {', '.join(choices)}")
        return default

    def spans(self, *keys: str) -> dict[str, Any]:
        """The durations that the table gives, as `<key>_seconds`."""
        given = {f"{key}_seconds": self.seconds(key) for key in keys if key in self.values}
        return {name: seconds for name, seconds in given.items() if seconds is not None}

    def seconds(self, key: str) -> float | None:
        """The duration of a key that the table has, in seconds; None if it is no duration."""
        value = self.values[key]
        seconds = parse_duration(value) if isinstance(value, str) else None
        if seconds is None:
            remedy = 'write a number and a unit (ms, s, m, h, d), as in "5m", at most 36500d'
            self.problem(key, f"not a duration: {value!r}", remedy)
        return seconds

    def tables(self, key: str) -> list[tuple[Any, str]]:
        """The tables of an array, each with its path, which has the name of the table, or its number from 1."""
        value = self.values.get(key, [])
        if not isinstance(value, list):
            self.problem(key, "must be an array of tables", f"write [[{key}]]")
            return []
        return [(item, f"{self._at(key)}[{_label(item, number)}]") for number, item in enumerate(value, 1)]


def _label(item: Any, number: int) -> str:
    name = (item.get("name") or item.get("column")) if isinstance(item, dict) else None
    return repr(name) if isinstance(name, str) else str(number)
