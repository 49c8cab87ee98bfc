"""Finds the messages for which a group owes an effect, for groups without `owed_when` in the rules.

This module reads the group's subscription from the broker, and converts the filter and the start of the subscription
into the condition `owed_when` over `message_v1`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from ..common.errors import ReconcileError, UsageProblem
from ..rules.rule import GroupRule, Rule
from ..sources import sql
from ..sources.base import DataSource
from ..sources.postgres import PostgresSource

_MAX_LISTED: Final = 10_000
_TOKEN: Final = re.compile(
    r"""\s*(?:(?P<number>[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))
      | (?P<string>'(?:[^']|'')*')
      | "(?P<quoted>[A-Za-z_][A-Za-z0-9_\-]*)"
      | (?P<word>[A-Za-z_][A-Za-z0-9_\-]*)
      | (?P<symbol><>|!=|<=|>=|[=<>(),]))""",
    re.VERBOSE,
)
_KEYWORDS: Final = frozenset({"AND", "OR", "NOT", "IN", "BETWEEN", "LIKE", "ESCAPE", "IS", "NULL", "TRUE", "FALSE"})
_NUMBER: Final = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)$"
_SUBSCRIPTION: Final = "SELECT filter FROM {view} WHERE consumer_group = {group} AND topic = {topic}"
# A group owes no effect for queue entries before its start offset. The order of a queue is nearly, but not exactly, the
# order of the log.
_BORDER: Final = """
SELECT max(e.log_id) FILTER (WHERE e.queue_offset < o.start_offset),
       min(e.log_id) FILTER (WHERE e.queue_offset >= o.start_offset)
FROM {offsets} o JOIN {entries} e ON e.queue_id = o.queue_id AND e.attempt = 0
WHERE o.consumer_group = {group} AND o.topic = {topic} AND o.start_offset > 0
"""
_BEFORE: Final = """
SELECT e.log_id
FROM {offsets} o JOIN {entries} e ON e.queue_id = o.queue_id AND e.attempt = 0
WHERE o.consumer_group = {group} AND o.topic = {topic} AND e.queue_offset < o.start_offset AND e.log_id > {first}
LIMIT {limit}
"""


def resolved(rule: Rule, broker: DataSource, schema: str) -> tuple[Rule, list[str]]:
    """The rule with `owed_when` filled in for every group that has an effect table, and notes for the report.

    Raises UsageProblem for a filter that cannot be written as SQL.
    """
    groups, notes = [], []
    for group in rule.groups:
        if group.owed_when is None and group.table is not None and isinstance(broker, PostgresSource):
            group, note = _of_group(rule, group, broker, schema)
            notes += note
        groups.append(group)
    return replace(rule, groups=tuple(groups)), notes


def _of_group(rule: Rule, group: GroupRule, broker: PostgresSource, schema: str) -> tuple[GroupRule, list[str]]:
    names = {name: sql.table_name(f"{name}_v1", schema) for name in ("group", "offset", "queue_entry")}
    wanted = {"group": sql.text(group.name), "topic": sql.text(rule.topic)}
    about = f"the subscription of group {group.name!r}"
    try:
        known = broker.attempt(_SUBSCRIPTION.format(view=names["group"], **wanted), about=about)
        if not known:
            return group, []
        views = {"offsets": names["offset"], "entries": names["queue_entry"], **wanted}
        last, first = broker.attempt(_BORDER.format(**views), about=about)[0]
        terms, before = [], []
        if last is not None:
            if first is not None:
                listing = _BEFORE.format(first=first, limit=_MAX_LISTED, **views)
                before = [str(row[0]) for row in broker.attempt(listing, about=about)]
            terms.append(_start(last, first, before))
    except UsageProblem as error:
        return group, [
            f"group {group.name}: the run expects an effect for every message, because it cannot read the group's "
            f"subscription ({error}); GRANT SELECT on group_v1, offset_v1 and queue_entry_v1, or write owed_when"
        ]
    if known[0][0].strip() not in ("", "*"):
        terms.append(filter_sql(known[0][0], group.name))
    if not terms:
        return group, []
    note = (
        f"group {group.name} owes an effect for each message that its subscription selects "
        f"({known[0][0] or 'everything'!r}"
    )
    began = f", from message {last} of the log on" if last is not None else ""
    notes = [f"{note}{began})"]
    if len(before) == _MAX_LISTED:
        notes.append(
            f"group {group.name}: more than {_MAX_LISTED:,} messages from before the group's start are mixed with "
            f"later messages in the log. The run excludes {_MAX_LISTED:,} of them, and expects effects for the others. "
            f"To exclude all these earlier messages, write owed_when"
        )
    return replace(group, owed_when=" AND ".join(terms)), notes


def _start(last: int, first: int | None, before: list[str]) -> str:
    """A condition for the messages from the group's start on.

    The condition selects the messages after `last`, the last log id before the start. Between `first` and `last`, the
    condition selects the messages that are not in `before`.
    """
    if first is None or first > last:
        return f"log_id > {last}"
    others = f" AND log_id <> ALL('{{{','.join(before)}}}'::bigint[])" if before else ""
    return f"(log_id > {last} OR (log_id >= {first}{others}))"


def filter_sql(text: str, group: str) -> str:
    """A subscription's filter as a condition over `message_v1`: tags (`a || b`) or `sql:` and an expression."""
    stripped = text.strip()
    if not stripped.lower().startswith("sql:"):
        return f"tag IN ({', '.join(sql.text(tag.strip()) for tag in text.split('||'))})"
    try:
        return f"(({' '.join(_translated(stripped[4:]))}) IS TRUE)"
    except ReconcileError:
        raise UsageProblem(
            f"group {group!r} subscribes with the filter {text!r}, which a run cannot convert to SQL: write owed_when "
            f"in the group's [[rule.group]], as SQL over message_v1."
        ) from None


def _translated(expression: str) -> list[str]:
    tokens, place = [], 0
    expression = expression.rstrip()
    while place < len(expression):
        match = _TOKEN.match(expression, place)
        if match is None:
            raise UsageProblem(expression)
        tokens.append(match)
        place = match.end()
    return [_token(match, tokens[number + 1 :]) for number, match in enumerate(tokens)]


def _token(match: re.Match[str], following: list[re.Match[str]]) -> str:
    word = match["word"]
    if word is not None and word.upper() in _KEYWORDS:
        return word.upper()
    name = word if word is not None else match["quoted"]
    if name is None:
        return f"{match[0].strip()}::text" if match["string"] else match[0].strip()
    value = (
        "(nullif(tag, '') COLLATE \"C\")" if name == "TAGS" else f'((headers::jsonb ->> {sql.text(name)}) COLLATE "C")'
    )
    if not _is_number_next(following):
        return value
    # With CASE, PostgreSQL casts only texts that are numbers.
    return f"(CASE WHEN {value} ~ '{_NUMBER}' THEN {value}::numeric END)"


def _is_number_next(following: list[re.Match[str]]) -> bool:
    """Whether the tokens `following`, which come after a name in the filter, compare this name with a number."""
    for match in following:
        word = (match["word"] or "").upper()
        if match["number"]:
            return True
        if not (match["symbol"] and match["symbol"] not in ("),")) and word not in ("NOT", "IN", "BETWEEN"):
            return False
    return False
