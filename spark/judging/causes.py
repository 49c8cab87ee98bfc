"""The causes of findings. All findings with the same rule, class, group and detail have one cause.

The detail of a MISMATCH, WRONG_EFFECT or WRONG_SUM is the name of the column that differs. The detail of an UNDELIVERED
is the state of the delivery, and that of a LOST on which groups have acted is _ACTED. Other findings have no detail.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql import Column
from pyspark.sql import functions as F

from ..common.safe_text import mask_passwords
from ..rules.rule import CLASSES, CLOSED, FindingClass, FindingSeverity
from .detail import DELIVERY_TEXTS
from .remedies import ACTED, REMEDIES, TRACE, UUID, is_acted

_SEVERITIES: Final = tuple(FindingSeverity)
# The classes for which a plan has a step that `outbox_repair` applies.
_MENDABLE: Final = (FindingClass.LOST.value, FindingClass.HALF_STUCK.value, FindingClass.DEAD.value)
# The classes whose detail is the column that differs.
_BY_COLUMN: Final = (FindingClass.MISMATCH.value, FindingClass.WRONG_EFFECT.value, FindingClass.WRONG_SUM.value)
_ACTED: Final = "with effects"
# What `result.json` has of a cause, beside its class and its commands.
_DESCRIBED: Final = (
    *("id", "rule", "group", "detail", "severity", "findings", "new", "acknowledged", "oldest", "subject", "meaning"),
)


def column() -> Column:
    """The details of a finding (array<string>), never empty. A MISMATCH has one detail per column that differs."""
    of_delivery = F.array(F.coalesce("delivery", F.lit("")))
    return (
        F.when(F.col("class").isin(*_BY_COLUMN) & (F.size("mismatched") > 0), F.col("mismatched"))
        .when(F.col("class") == FindingClass.UNDELIVERED.value, of_delivery)
        .when(is_acted(), F.array(F.lit(_ACTED)))
        .otherwise(F.array(F.lit("")))
    )


def _details(finding: Mapping[str, Any]) -> list[str]:
    """The same as `column`, for a finding that was read from the findings file."""
    if finding["class"] == FindingClass.UNDELIVERED.value:
        return [finding["delivery"] or ""]
    if finding["class"] == FindingClass.LOST.value and finding.get("effects"):
        return [_ACTED]
    return (finding["class"] in _BY_COLUMN and finding.get("mismatched")) or [""]


def ids_of(finding: Mapping[str, Any]) -> list[str]:
    """The ids of the causes of a finding. A MISMATCH in several columns has several causes."""
    return [id_of(finding["rule"], finding["class"], finding["group"], detail) for detail in _details(finding)]


def id_of(rule: str, finding_class: str, group: str, detail: str) -> str:
    """The id of a cause. It is the same in all runs."""
    parts = (rule, finding_class, group, detail)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """All findings of one cause, and their numbers.

    `oldest` is the time of the oldest message or row, in ISO 8601. `acknowledged` is a part of `findings`; `new` are
    the findings that no earlier result had and that are not acknowledged. The totals of a result have a MISMATCH in
    several columns once, by the numbers `first_…` of the cause of its first column.
    """

    rule: str
    finding_class: str
    group: str
    detail: str
    severity: str
    findings: int
    new: int
    acknowledged: int
    first_findings: int
    first_new: int
    first_acknowledged: int
    oldest: str | None

    @property
    def id(self) -> str:
        """The same in all runs."""
        return id_of(self.rule, self.finding_class, self.group, self.detail)

    @property
    def subject(self) -> str:
        """The cause in a few words, without its number of findings."""
        of_group = f", group {self.group}" if self.group else ""
        text = f"{self.finding_class} of rule {self.rule}{of_group}"
        if self.finding_class == FindingClass.UNDELIVERED:
            return f"{text}, delivery {self.detail or 'unknown'}"
        if self.finding_class in _BY_COLUMN and self.detail:
            return f"{text}, column {self.detail}"
        return f"{text}, {self.detail}" if self.detail else text

    @property
    def meaning(self) -> str:
        """A sentence about the cause."""
        meaning = (ACTED if self.detail == _ACTED else REMEDIES[FindingClass(self.finding_class)]).meaning
        known = self.finding_class == FindingClass.UNDELIVERED and DELIVERY_TEXTS.get(self.detail)
        return f"{meaning} The broker's view: {known}." if known else meaning


def ordered(causes: Iterable[Cause]) -> list[Cause]:
    """The causes, the most urgent first.

    Causes with open (not acknowledged) findings come first. Among them, the order is: severity; LATE last, because
    nothing is missing; causes with new findings first; what a repair can mend; the class; the number of findings.
    """
    return sorted(causes, key=_urgency)


def _urgency(cause: Cause) -> tuple[Any, ...]:
    is_open = cause.findings > cause.acknowledged
    severity = _SEVERITIES.index(cause.severity) if cause.severity in _SEVERITIES else len(_SEVERITIES)
    is_late = cause.finding_class == FindingClass.LATE.value
    return (
        cause.finding_class in CLOSED, not is_open, severity, is_late, not cause.new,
        cause.finding_class not in _MENDABLE or cause.detail == _ACTED,
        CLASSES.index(FindingClass(cause.finding_class)), -cause.findings, cause.rule, cause.group, cause.detail,
    )  # fmt: skip


def order() -> tuple[Column, ...]:
    """The order of findings: that of their causes, as far as a finding alone shows it. Acknowledged ones come last."""
    by_urgency = sorted(CLASSES, key=lambda name: (name is FindingClass.LATE, name.value not in _MENDABLE))
    severity, place = (F.array(*(F.lit(name.value) for name in names)) for names in (_SEVERITIES, by_urgency))
    return (
        F.col("class").isin(*CLOSED), F.col("acknowledged").isNotNull(), F.array_position(severity, F.col("severity")),
        F.array_position(place, F.col("class")), is_acted(), F.col("rule"), F.col("group"), F.col("key"),
    )  # fmt: skip


def described(
    found: Iterable[Cause], examples: Iterable[Mapping[str, Any]], output: str, rules: str
) -> list[dict[str, Any]]:
    """The causes as `result.json` has them, each with `listing` and `commands`. `listing` is the command that prints
    all findings of the cause. `commands` are the first check and the repair.

    `examples` are findings with the id of their `cause`, in the order of `report.samples`.
    """
    of_cause: dict[str, list[Mapping[str, Any]]] = {}
    for finding in examples:
        of_cause.setdefault(finding["cause"], []).append(finding)
    output = mask_passwords(output)  # The page and result.json must not repeat a password of a URI.
    result = []
    for cause in found:
        listing = f"outbox-reconcile findings --output {shlex.quote(output)} --cause {cause.id}"
        commands = _commands(cause, of_cause.get(cause.id, []), listing, output, rules) or [listing]
        known = {name: getattr(cause, name) for name in _DESCRIBED} | {"class": cause.finding_class}
        is_done = cause.finding_class in CLOSED or cause.findings == cause.acknowledged
        result.append({**known, "listing": listing, "commands": [] if is_done else commands})
    return result


def _commands(cause: Cause, examples: Sequence[Mapping[str, Any]], listing: str, output: str, rules: str) -> list[str]:
    """The commands for all findings of a cause, the first check first; empty if only the findings themselves help."""
    name, group = FindingClass(cause.finding_class), shlex.quote(cause.group)
    # A command must not act again on a finding that is acknowledged, so it names the ids of all other findings.
    left = [each for each in examples if not each.get("acknowledged")]
    ids = [each.get("message_id") or "" for each in left]
    has_all_ids = len(ids) == cause.findings - cause.acknowledged and all(re.fullmatch(UUID, each) for each in ids)
    example = (left or examples or [{}])[0]
    topic = shlex.quote(example.get("topic") or "")
    message_id = example.get("message_id") or ""
    manage = "python manage.py"
    if name in (FindingClass.LOST, FindingClass.HALF_STUCK) and cause.detail != _ACTED:
        given = f"--rules {shlex.quote(rules)} --output {shlex.quote(output)}"
        publisher = shlex.quote(f"{cause.rule}=MODULE.FUNCTION")
        publisher = f" --publisher {publisher}" if name is FindingClass.LOST else ""
        return [f"outbox-reconcile plan {given} > plan.jsonl", f"{manage} outbox_repair plan.jsonl{publisher}"]
    if name is FindingClass.DEAD:
        check, replay = (f"{manage} outbox_dead_letter {verb} {group}" for verb in ("list", "replay"))
        if not cause.acknowledged:
            return [f"{check} --topic {topic}", f"{replay} --topic {topic}"]
        return [f"{check} --topic {topic}", f"{replay} {' '.join(ids)}" if has_all_ids else listing]
    if name is FindingClass.UNDELIVERED:
        check = f"{manage} outbox_group offsets {group}"
        if cause.detail != "passed":
            return [check]
        if not has_all_ids:
            # The listing has the command for each finding. To reset the group would repeat the effects of all others.
            return [check, listing]
        return [check, *(f"{manage} outbox_message redeliver {each} --group {group}" for each in ids)]
    if name is FindingClass.LATE:
        return [f"{manage} outbox_status"]
    wrong = (FindingClass.WRONG_EFFECT, FindingClass.WRONG_SUM, FindingClass.EARLY)
    traced = (FindingClass.ORPHAN, FindingClass.UNREADABLE, FindingClass.DUPLICATE, *wrong)
    if name in traced and re.fullmatch(UUID, message_id):
        return [TRACE.replace("{message_id}", message_id)]
    return []
