"""The first stage: computes the window of rows to judge, and checks that all tables and columns of a rule are readable.

The window begins at the end of the previous result. The window ends at the watermark minus the rule's `grace`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from ..common.errors import RunIncomplete, TableMissing, UsageProblem
from ..common.options import RunOptions
from ..judging.classify import Window
from ..rules.rule import FieldType, Rule, Rules, SourceKind
from ..sources import contract
from ..sources.archived import ArchivedSource
from ..sources.base import DataSource, SourceBoundary
from ..sources.databases import Sources
from ..sources.postgres import PostgresSource
from . import subscriptions
from .job import Job

# If retention has removed messages, the run assumes that a half message is at most this much older than its row's time.
HALF_AGE: Final = timedelta(seconds=60)
_WITHOUT: Final = {
    "dead_letter_v1": "dead_letter_v1 was not exported, so a dead letter is reported as UNDELIVERED, not as DEAD",
    "timed_out_v1": "timed_out_v1 was not exported, or the role may not read it, so a message whose time limit was "
    "over is reported as UNDELIVERED",
    "delivery_v1": "delivery_v1 was not exported, so a finding does not show the state of its message in each group",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRule:
    """A rule whose subscriptions are resolved, whose tables are checked, and whose window is known.

    `missing_views` has the names of the views that an export lacks, and that only add details to findings. The function
    `_looked_back` describes the field `looked_back`.
    """

    rule: Rule
    window: Window
    missing_views: frozenset[str]
    looked_back: dict[str, str | None] | None
    notes: list[str]


def prepare(
    rule: Rule, job: Job, snapshots: Sequence[SourceBoundary], previous: dict[str, Any] | None, sources: Sources
) -> PreparedRule:
    """Prepare a rule.

    Raises UsageProblem if an operator must correct something, and RunIncomplete if the run must be repeated later.
    """
    horizon = _horizon(rule, sources)
    schema = job.rules.databases[job.rules.broker].schema
    rule, of_groups = subscriptions.resolved(rule, sources.broker, schema)
    missing = _missing_views(rule, sources)
    known = _known_rule(previous, rule)
    window = _window(with_look_backs(rule, job.rules, sources), job.options, snapshots, known)
    notes: list[str] = []
    if horizon is not None:
        window, notes = _limited_by_retention(rule, window, horizon)
    if isinstance(source := sources[rule.database], PostgresSource):
        source.check_finite(contract.rows(rule), window.since)
    notes += of_groups + [_WITHOUT[view] for view in missing]
    notes += [
        f"the acknowledgement of {each.finding_class} {each.key!r} has ended ({each.text}): the finding counts again. "
        f"Remove the acknowledgement, or give it another until"
        for each in job.rules.acknowledged
        if each.rule == rule.name and each.until <= job.started
    ]
    notes += [
        f"group {group.name} is judged by the broker's offsets, which show whether the group is past a message, "
        f"but not when the group passed it: the group is never LATE"
        for group in rule.groups
        if not group.table
    ]
    looked_back = _looked_back(window, known)
    return PreparedRule(
        rule=rule, window=window, missing_views=frozenset(missing), looked_back=looked_back, notes=notes
    )


def _horizon(rule: Rule, sources: Sources) -> datetime | None:
    """The time before which retention may have removed messages of the topic; None if retention has removed no message.

    Raises UsageProblem for a topic that is not declared.
    """
    try:
        if isinstance(sources.broker, ArchivedSource) and any(not group.table for group in rule.groups):
            # If a group has no effect table, the rule needs the group's positions, and the archive does not contain
            # them. So the run judges this rule from the log alone.
            return sources.broker.live_horizon(rule.topic)
        return sources.broker.horizon(rule.topic)
    except UsageProblem as error:
        raise UsageProblem(f"rule {rule.name!r}: {error}") from error


def _missing_views(rule: Rule, sources: Sources) -> list[str]:
    """Raise UsageProblem if a table or column of the rule does not exist, or if a column cannot be compared.

    Return the names of the optional views that an export lacks. Optional views only add details to findings.
    """
    sources[rule.database].check(contract.rows(rule))
    sources.broker.check(contract.messages(rule, detailed=True))
    for number, group in enumerate(rule.groups):
        source = sources[group.database] if group.table else sources.broker
        source.check(contract.effects(rule, number))
    missing = []
    optional = (contract.dead_letters(rule), contract.timed_out(rule), contract.deliveries(rule))
    for selection in optional if rule.groups else ():
        try:
            sources.broker.check(selection)
        except TableMissing:
            missing.append(selection.table)
    return missing


def _window(
    rule: Rule, options: RunOptions, snapshots: Sequence[SourceBoundary], known: dict[str, Any] | None
) -> Window:
    """The rule's window; `known` is the rule in the previous result.

    Raises RunIncomplete if the interval is not over yet, or if no source has a watermark.
    """
    times = [reading.watermark for reading in snapshots if reading.watermark is not None]
    if not times:
        raise RunIncomplete(
            "no source contains a time, so the watermark is not known. Write watermark = … in [database.…]."
        )
    watermark = min(times)
    boundary = watermark - timedelta(seconds=rule.grace_seconds)
    since, until = options.since, options.until
    if until is not None:
        if until > boundary:
            raise RunIncomplete(
                f"rule {rule.name!r}: the interval ends at {until.isoformat()}, but only rows before "
                f"{boundary.isoformat()} can be judged yet (watermark {watermark.isoformat()} minus the grace "
                f"period). Repeat the run later."
            )
        boundary = until
    if since is None and known is not None and not options.full:
        since = datetime.fromisoformat(known["until"])
    if since is not None and until is None:
        boundary = max(boundary, since)
        back = _look_back(rule, options, since, boundary, known)
        since = since if back is None else min(since, back)
    return Window(since, boundary, watermark, is_exact=until is not None)


def with_look_backs(rule: Rule, rules: Rules, sources: Sources | Mapping[str, DataSource]) -> Rule:
    """The rule with the time between its look backs. With the checksum pre-filter, a look back reads only the buckets
    whose checksums differ, so it may be made every hour."""
    if rule.look_back_every_seconds is not None:
        return rule
    is_cheap = rule.bucket_seconds and why_no_checksums(rule, rules, sources) is None
    return replace(rule, look_back_every_seconds=3_600.0 if is_cheap else 86_400.0)


def _look_back(
    rule: Rule, options: RunOptions, since: datetime, boundary: datetime, known: dict[str, Any] | None
) -> datetime | None:
    """The time from which the run's look back judges rows again. `since` and `boundary` are the run's window.

    The span of the rule is counted from the last look back. Counted from `boundary`, a row that was added right after
    the last look back would never be seen if the span is not longer than the time between two of them. The span of
    --look-back is counted from `boundary`.

    The result is None if the rule has no look back and --look-back names none, or if the command has no --look-back and
    no look back of the rule is due.
    """
    if options.look_back:
        return boundary - timedelta(seconds=options.look_back)
    if not rule.look_back_seconds:
        return None
    looked_back = None if known is None else known.get("looked_back")
    last = None if looked_back is None else datetime.fromisoformat(looked_back["at"])
    every = timedelta(seconds=rule.look_back_every_seconds or 0)
    if options.look_back is None and last is not None and boundary - last < every:
        return None
    return min(since, last or since) - timedelta(seconds=rule.look_back_seconds)


def _limited_by_retention(rule: Rule, window: Window, horizon: datetime) -> tuple[Window, list[str]]:
    """The window without rows whose messages retention may have removed.

    A message may be stored before its row's time, so retention may have removed the message although the row's time is
    after `horizon`.
    """
    floor = horizon + max(HALF_AGE, rule.longest_wait)
    if window.since is not None and window.since >= floor:
        return replace(window, floor=floor), []
    note = (
        f"retention: messages stored before {horizon.isoformat()} may be gone, rows before {floor.isoformat()} are not "
        f"judged"
    )
    return replace(window, floor=floor, since=floor), [note]


def _known_rule(previous: dict[str, Any] | None, rule: Rule) -> dict[str, Any] | None:
    """The rule in the previous result; None if the rule is new or was changed."""
    known = () if previous is None else previous["rules"]
    return next((each for each in known if (each["name"], each["digest"]) == (rule.name, rule.digest)), None)


def _looked_back(window: Window, known: dict[str, Any] | None) -> dict[str, str | None] | None:
    """The last look back, as a dictionary. `at` is the time of the look back, and `from` is the time of the oldest rows
    that the look back judged again (None if the look back judged all rows again).

    None for an interval, because each run judges the whole interval, and if no run has looked back.
    """
    if window.is_exact:
        return None
    if known is not None and window.since is not None and window.since >= datetime.fromisoformat(known["until"]):
        last: dict[str, str | None] | None = known.get("looked_back")
        return last
    return {"at": window.until.isoformat(), "from": None if window.since is None else window.since.isoformat()}


def why_no_checksums(rule: Rule, rules: Rules, sources: Sources | Mapping[str, DataSource]) -> str | None:
    """The reason why the checksum pre-filter cannot judge the rule; None if it can."""
    if any(rules.databases[name].kind is not SourceKind.POSTGRES for name in (rule.database, rules.broker)):
        return "the rows and the broker must be in PostgreSQL"
    if rule.has_several_messages:
        return "the rule needs messages = 'exactly_one'"
    if rule.message_when:
        return "a checksum cannot apply message_when"
    if not any((item.column, item.type) == (rule.time, FieldType.TIMESTAMP) for item in rule.fields):
        return (
            f"no field of type timestamp is compared with column {rule.time!r}, so a message does not tell its bucket"
        )
    for item in rule.fields:
        if item.tolerance is not None or item.former:
            return f"field {item.column!r} has a tolerance, or several names in the body"
    for group in rule.groups:
        if group.compare_effect or group.sum_effect:
            return f"the effects of {group.name!r} are compared by value"
        if group.owed_when:
            return f"group {group.name!r} owes an effect only for some messages"
        if group.table is None or group.key is None:
            return f"the effects of {group.name!r} are not found by key"
        if sources[group.database] is not sources[rule.database]:
            return f"the effects of {group.name!r} are in another database than the rows"
    return None


def margin(rule: Rule) -> timedelta:
    """The run also reads rows and messages from this much time before its window, because a message may be older than
    its row's time."""
    return timedelta(seconds=max(60.0, rule.grace_seconds))
