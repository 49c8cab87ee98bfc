"""Plans of a repair as tests write them, and the command that verifies and applies them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

from django.core.management import call_command

from outbox.contrib.django.models import OperatorAction
from outbox.contrib.reconciliation.findings import replace
from outbox.contrib.reconciliation.models import Finding, SavedReconciliation

AT = datetime(2025, 6, 1, 12, tzinfo=UTC)
ORDERS: dict[str, Any] = {
    "database": "default",
    "table": '"shop_order"',
    "key": '"number"',
    "when": "(status LIKE 'n%')",
    "topic": "orders",
    "tag": None,
    "message_when": None,
    "messages": "exactly_one",
    "effects": [],
}
EFFECTS: dict[str, Any] = {
    "group": "logistics",
    "database": "other",
    "table": '"shop_effect"',
    "key": '"number"',
    "when": None,
}
PUBLISHER = "orders=tests.django.repair_publisher.order"


def lost(key: str, **more: Any) -> dict[str, Any]:
    return finding("publish", "LOST", key, row_at=AT.isoformat(), **more)


def finding(action: str, kind: str, key: str, **more: Any) -> dict[str, Any]:
    """A line of a plan."""
    unknown = dict.fromkeys(("message_id", "transaction_id", "row_at", "why", "detail"))
    own = {"step": f"{kind} {key}", "action": action, "class": kind, "rule": "orders", "key": key, "group": ""}
    return {**unknown, **own, "topic": "orders", **more}


def save_finding(step: dict[str, Any]) -> Finding:
    """Save a result whose only finding has this step of a plan, as `outbox_reconcile --save` does."""
    Finding.objects.all().delete()
    SavedReconciliation.objects.all().delete()
    unknown = dict.fromkeys(("transaction_id", "row", "body", "at", "first_seen"))
    found = {**unknown, **step, "run": "a run", "severity": "critical"}
    cause = {"subject": f"{step['class']} of rule orders", "class": step["class"], "severity": "critical"}
    causes = [{**cause, "findings": 1, "new": 1, "oldest": AT.isoformat()}]
    head = {"run": "a run", "judged_at": AT.isoformat(), "causes": causes, "rules": {"orders": ORDERS}}
    replace("orders", [json.dumps(found)], [json.dumps(head), json.dumps(step)], {})
    return Finding.objects.get()


@dataclass
class Repair:
    """Plans in a folder."""

    folder: Path
    source: dict[str, Any] = field(default_factory=lambda: dict(ORDERS))
    publisher: str = PUBLISHER

    def command(self, *steps: dict[str, Any], apply: bool = True, more: tuple[str, ...] = ()) -> list[str]:
        head = {"plan": 2, "run": "a run", "judged_at": AT.isoformat(), "rules": {"orders": self.source}}
        path = self.folder / "plan.jsonl"
        path.write_text("".join(f"{json.dumps(line)}\n" for line in (head, *steps)))
        options = ["--publisher", self.publisher, "--reason", "a test", *more]
        return ["outbox_repair", str(path), *(["--apply"] if apply else []), *options]

    def run(self, *steps: dict[str, Any], apply: bool = True, more: tuple[str, ...] = ()) -> list[tuple[str, str]]:
        """Outcome and detail of each step."""
        out = StringIO()
        code: object = 0
        try:
            call_command(*self.command(*steps, apply=apply, more=("--json", *more)), stdout=out)
        except SystemExit as end:
            code = end.code
        results = [json.loads(line)["result"] for line in out.getvalue().splitlines()]
        outcomes = [
            (result["outcome"], ": ".join(filter(None, (result["detail"], result["content"])))) for result in results
        ]
        assert code == int(any(outcome in ("refused", "reported", "left") for outcome, _ in outcomes))
        return outcomes

    def outcomes(self, *steps: dict[str, Any], **options: Any) -> list[str]:
        return [outcome for outcome, _ in self.run(*steps, **options)]

    def recorded(self) -> list[OperatorAction]:
        """The entries of the audit, in their order."""
        return list(OperatorAction.objects.order_by("pk"))
