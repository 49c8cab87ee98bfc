"""Reads a plan that `outbox-reconcile plan` has written."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from outbox.errors import UsageError

VERSION: Final = 2


class RepairAction(enum.StrEnum):
    """The action of a step."""

    PUBLISH = "publish"
    REPLAY = "replay"
    ASK = "ask"
    REPORT = "report"


@dataclass(frozen=True, kw_only=True, slots=True)
class Effects:
    """Where a group of a rule stores its effects. `table`, `key` and `when` are SQL texts."""

    group: str
    database: str
    table: str
    key: str
    when: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleSource:
    """Where a rule finds its rows and messages. `table`, `key`, `when` and `message_when` are SQL texts.

    `messages` says how many messages a row must have: exactly_one or at_least_one.
    """

    database: str
    table: str
    key: str
    when: str | None
    topic: str
    tag: str | None
    message_when: str | None
    messages: str
    effects: tuple[Effects, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairStep:
    """One finding and its action. If the action is REPORT, `why` is the reason."""

    step: str
    action: RepairAction
    rule: str
    key: str
    group: str
    topic: str
    finding_class: str
    message_id: UUID | None
    transaction_id: UUID | None
    row_at: datetime | None
    why: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairPlan:
    """A repair plan with all its steps. `digest` is the hash by which the audit identifies the plan."""

    digest: str
    run: str
    sources: Mapping[str, RuleSource]
    steps: tuple[RepairStep, ...]


def read(path: Path) -> RepairPlan:
    """Read a plan from a file. If the file is not a plan, raises UsageError with the number of the wrong line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the plan {path} cannot be read: {error}. `outbox-reconcile plan` prints one.") from error
    if not text.strip():
        raise UsageError(
            f"the plan {path} is empty, so `outbox-reconcile plan` has failed. Run that command again, and read its "
            "error."
        )
    number = 1
    try:
        lines = text.split("\n")
        head = json.loads(lines[0])
        if head["plan"] != VERSION:
            raise UsageError(
                f"{path} is a plan of version {head['plan']}, and this release reads version {VERSION}. Make the "
                "plan again, with `outbox-reconcile plan` of this release."
            )
        sources = {name: source_of(source) for name, source in head["rules"].items()}
        steps = []
        for number, line in enumerate(lines[1:], start=2):  # noqa: B007 - for the error below
            if line.strip():
                steps.append(step_of(json.loads(line), sources))
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path}:{number}: not a line of a plan ({type(error).__name__}: {error}). Make the plan with "
            f"`outbox-reconcile plan`. You may delete lines of steps, but not the first line."
        ) from error
    return RepairPlan(
        digest=hashlib.sha256(text.encode()).hexdigest()[:16], run=head["run"], sources=sources, steps=tuple(steps)
    )


def source_of(item: Mapping[str, Any]) -> RuleSource:
    """One rule of the first line of a plan."""
    effects = tuple(Effects(**each) for each in item["effects"])
    return RuleSource(**{**item, "effects": effects})


def step_of(item: Mapping[str, Any], sources: Mapping[str, RuleSource]) -> RepairStep:
    """One further line of a plan. Raises KeyError, TypeError or ValueError if it is not a step."""
    action = RepairAction(item["action"])
    step = RepairStep(
        step=item["step"],
        action=action,
        rule=item["rule"],
        key=item["key"] or "",
        group=item["group"] or "",
        topic=item["topic"],
        finding_class=item["class"],
        message_id=_uuid(item["message_id"]),
        transaction_id=_uuid(item["transaction_id"]),
        row_at=datetime.fromisoformat(item["row_at"]) if item["row_at"] else None,
        why=item["why"],
    )
    needed = {
        RepairAction.PUBLISH: step.row_at,
        RepairAction.REPLAY: step.message_id,
        RepairAction.ASK: step.transaction_id,
    }
    if action in needed and needed[action] is None:
        raise ValueError(f"a step to {action} without its subject")
    if action is RepairAction.PUBLISH and step.rule not in sources:
        raise ValueError(f"the first line of the plan does not contain the rule {step.rule!r}")
    return step


def _uuid(value: str | None) -> UUID | None:
    return UUID(value) if value else None
