"""Finds the messages for which a group owes an effect, for groups without `owed_when` in the rules.

This module reads the group's subscription from the broker, and converts the filter and the start of the subscription
into the condition `owed_when` over `message_v1`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ..common.errors import UsageProblem
from ..rules.rule import GroupRule, Rule
from ..sources import sql
from ..sources.base import DataSource
from ..sources.postgres import PostgresSource

_SUBSCRIPTION: Final = "SELECT filter FROM {view} WHERE consumer_group = {group} AND topic = {topic}"
# A group owes no effect for what its queues had before its start offset. The first query has the newest of these
# messages. The second query has the messages that are older than this one, but entered their queue after the start:
# they were delayed or undecided, or were stored at the moment of the start.
_ENTRIES: Final = """
FROM {offsets} o JOIN {entries} e ON e.queue_id = o.queue_id AND e.attempt = 0
WHERE o.consumer_group = {group} AND o.topic = {topic}
"""
_START: Final = f"SELECT max(e.log_id) {_ENTRIES} AND e.queue_offset < o.start_offset"
_LATER: Final = f"SELECT e.log_id {_ENTRIES} AND e.queue_offset >= o.start_offset AND e.log_id < {{start}}"


def resolved(rule: Rule, broker: DataSource, schema: str) -> tuple[Rule, list[str]]:
    """The rule with `owed_when` filled in for every group that has an effect table, and notes for the report.

    Raises UsageProblem for a filter that is an expression.
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
        [(start,)] = broker.attempt(_START.format(**views), about=about)
        later = [] if start is None else broker.attempt(_LATER.format(start=start, **views), about=about)
    except UsageProblem as error:
        return group, [
            f"group {group.name}: the run expects an effect for every message, because it cannot read the group's "
            f"subscription ({error}); GRANT SELECT on group_v1, offset_v1 and queue_entry_v1, or write owed_when"
        ]
    text = known[0][0].strip()
    terms = []
    if start is not None:
        listed = f" OR log_id IN ({', '.join(str(row[0]) for row in later)})" if later else ""
        # A message whose delay is not over has no entry yet.
        terms.append(f"(log_id > {start} OR deliver_at > now(){listed})")
    if text not in ("", "*"):
        terms.append(_of_tags(text, group.name))
    if not terms:
        return group, []
    began = "" if start is None else f", from message {start} of the log on"
    note = f"group {group.name} owes an effect for each message that its subscription selects ({text or '*'!r}{began})"
    return replace(group, owed_when=" AND ".join(terms)), [note]


def _of_tags(text: str, group: str) -> str:
    """The filter of a subscription by tags (`a || b`) as a condition over `message_v1`."""
    if text.lower().startswith("sql:"):
        raise UsageProblem(
            f"group {group!r} subscribes with the filter {text!r}: write owed_when in the group's [[rule.group]], as "
            f"SQL over message_v1, for example \"headers::jsonb ->> 'region' = 'eu'\"."
        )
    return f"tag IN ({', '.join(sql.text(tag.strip()) for tag in text.split('||'))})"
