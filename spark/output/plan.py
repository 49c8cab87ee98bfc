"""The plan for the repair of the findings of the current result. A plan consists of JSON lines, which a person reads,
shortens and then applies.

The first line of a plan, the head, names the run. For each rule, the head has the SQL that reads the row and the
messages again. Each further line of a plan is one step. Making a plan reads only the result; it reads no database and
changes nothing. `manage.py outbox_repair` verifies each step of the plan before it applies the step.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

from ..common.store import Store, plain_json
from ..rules.rule import CLOSED, FindingClass, Rule, Rules, SourceKind
from ..sources import sql
from . import summary

VERSION: Final = 2
_SHOWN: Final = ("rule", "key", "group", "topic", "class", "message_id", "transaction_id", "detail")


class RepairAction(enum.StrEnum):
    """The action that `outbox_repair` performs when it applies a step."""

    PUBLISH = "publish"
    """The repair publishes the row's message again, under an id derived from rule, key and the row's time."""
    REPLAY = "replay"
    """The repair delivers the dead letter to its group again."""
    ASK = "ask"
    """The repair asks the ledger how the half message's transaction ended."""
    REPORT = "report"
    """Applying this step has no effect, because a person has to decide. The field `why` gives the reason."""


_ACTIONS: Final = {
    FindingClass.LOST.value: RepairAction.PUBLISH,
    FindingClass.DEAD.value: RepairAction.REPLAY,
    FindingClass.HALF_STUCK.value: RepairAction.ASK,
}


def lines(output: str, rules: Rules, limit: int | None = None) -> Iterator[str]:
    """The lines of the plan for the result in `output`: the head, then a step per open finding, in ASCII, the most
    urgent first. At most `limit` steps.

    Raises UsageProblem if `output` has no result.
    """
    store = Store(output)
    result = store.result_in_force()
    known = {rule.name: rule for rule in rules.rules}
    judged_by = {item["name"]: item["digest"] for item in result["rules"]}
    current = {name: rule for name, rule in known.items() if judged_by.get(name) == rule.digest}
    head = {
        "plan": VERSION,
        "run": result["run"],
        "judged_at": result["finished_at"],
        "causes": open_causes(result),
        "rules": {name: _source(rule, rules) for name, rule in current.items()},
    }
    yield json.dumps(head)
    is_open = (finding for finding in store.rows(result["findings"]) if finding["class"] not in CLOSED)
    for finding in islice(is_open, limit):
        yield json.dumps(_step(finding, current.get(finding["rule"]), rules), default=plain_json)


def open_causes(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The causes of a result that have open findings, with the number of these findings, the most urgent first."""
    shown = ("subject", "class", "severity", "new", "oldest")
    return [
        {**{name: cause[name] for name in shown}, "findings": cause["findings"] - cause["acknowledged"]}
        for cause in summary.urgent(result)
    ]


def _source(rule: Rule, rules: Rules) -> dict[str, Any]:
    """The SQL that finds the rule's row and messages, in the dialect of their databases, with quoted names."""
    return {
        **_located(rule.database, rule.table, rule.key, rule.when),
        "topic": rule.topic,
        "tag": rule.tag,
        "message_when": f"({rule.message_when})" if rule.message_when else None,
        "messages": rule.messages.value,
        # A repair reads the effects of a key before it publishes the row again.
        "effects": [
            {"group": group.name, **_located(group.database, group.table, group.key, group.when)}
            for group in rule.groups
            if group.table and group.key
        ],
    }


def _located(database: str, table: str, key: str, when: str | None) -> dict[str, Any]:
    condition = f"({when})" if when else None
    return {"database": database, "table": sql.table_name(table), "key": sql.expression(key), "when": condition}


def _step(finding: Mapping[str, Any], rule: Rule | None, rules: Rules) -> dict[str, Any]:
    why = _hindrance(finding, rule, rules)
    action = RepairAction.REPORT if why else _ACTIONS[finding["class"]]
    named = [finding[name] or "" for name in ("rule", "class", "group", "key", "message_id")]
    step = hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16]
    shown = {name: finding[name] for name in _SHOWN}
    return {"step": step, "action": action.value, **shown, "row_at": finding["row_at"], "why": why}


def _hindrance(finding: Mapping[str, Any], rule: Rule | None, rules: Rules) -> str | None:
    """The reason why a person has to decide; None if `outbox_repair` can apply the step."""
    if finding["class"] not in _ACTIONS:
        return f"{finding['class']} is only reported. {finding['remedy'] or ''}".rstrip()
    if finding["acknowledged"]:
        return f"acknowledged: {finding['acknowledged']}"
    if finding["class"] == FindingClass.LOST.value and finding["effects"]:
        return f"groups have acted on this key. {finding['remedy']}"
    if rule is None:
        return "the rule was removed from the rules file or changed after the run: run the reconciliation again"
    if finding["class"] == FindingClass.DEAD.value and not finding["message_id"]:
        return "the finding has no message id, so the dead letter to replay is not known"
    if finding["class"] != FindingClass.LOST.value:
        return None
    if rules.databases[rule.database].kind is not SourceKind.POSTGRES:
        return "the rows were read from an export, but a repair must read the row again in its database"
    for group in rule.groups:
        if group.table and rules.databases[group.database].kind is not SourceKind.POSTGRES:
            return f"the effects of {group.name} were read from an export, but a repair must read them in a database"
    if finding["rows"] != 1:
        return f"{finding['rows']} rows have this key, so the row to publish is not known"
    return None
