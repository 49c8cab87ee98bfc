"""The table of reconciliation's findings holds one result per output, whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.db import DatabaseError

from outbox.broker.operations.conditions import Severity
from outbox.contrib.reconciliation.findings import CONDITIONS, replace
from outbox.contrib.reconciliation.models import Finding, SavedReconciliation

pytestmark = pytest.mark.usefixtures("application")


@pytest.fixture(autouse=True)
def _no_findings(application: None) -> Any:
    yield
    Finding.objects.all().delete()
    SavedReconciliation.objects.all().delete()


def line(key: str, **changed: object) -> str:
    texts = ("detail", "message_id", "transaction_id", "row", "body", "at", "first_seen")
    found = {"run": "r1", "rule": "orders", "group": "", "class": "LOST", "severity": "critical", "key": key}
    return json.dumps({**found, **dict.fromkeys(texts), **changed})


HEAD = {"plan": 2, "run": "r1", "judged_at": "2025-06-01T00:00:00+00:00", "causes": [], "rules": {}}


def save(output: str, lines: list[str], *steps: dict[str, Any], **head: Any) -> int:
    return replace(output, lines, [json.dumps(one) for one in ({**HEAD, **head}, *steps)], {"app": "default"})


def keys(output: str) -> list[str]:
    return list(Finding.objects.filter(output=output).order_by("key").values_list("key", flat=True))


def test_a_result_replaces_the_previous_one_of_its_output() -> None:
    save("orders", [line("1"), line("2", at="2025-06-01T00:00:00+00:00")])
    save("refunds", [line("9")])
    assert save("orders", [line("2"), line("3")]) == 2
    assert keys("orders") == ["2", "3"]
    assert keys("refunds") == ["9"]
    save("orders", [])
    assert keys("orders") == []


def test_a_result_that_cannot_be_saved_leaves_the_previous_one() -> None:
    save("orders", [line("1")])
    with pytest.raises(DatabaseError):
        save("orders", [line("2"), line("3", **{"class": "x" * 99})])
    assert keys("orders") == ["1"]


def test_values_are_made_to_fit() -> None:
    save("orders", [line("a\0b", severity="s" * 99, body="x" * 5_000)])
    found = Finding.objects.get()
    assert (found.key, len(found.severity), len(found.body)) == ("a\N{REPLACEMENT CHARACTER}b", 15, 5_000)


def test_a_finding_has_the_step_of_its_plan() -> None:
    step = {**json.loads(line("1", message_id=None)), "action": "publish", "step": "s1"}
    other = {**json.loads(line("1", group="mail", **{"class": "DEAD"})), "action": "replay", "step": "s2"}
    nul = {**json.loads(line("a\0b")), "action": "publish", "step": "s3"}
    save("orders", [line("1"), line("1", group="mail", **{"class": "DEAD"}), line("a\0b")], other, step, nul)
    steps = [found.step and found.step["step"] for found in Finding.objects.order_by("id")]
    assert steps == ["s1", "s2", None], "PostgreSQL's JSON cannot store the third"
    saved = SavedReconciliation.objects.get()
    assert saved.plan == {"rules": {}, "databases": {"app": "default"}}


def cause(severity: str, findings: int) -> dict[str, Any]:
    return {"subject": f"LOST of {severity}", "class": "LOST", "severity": severity, "findings": findings,
            "new": 1, "oldest": None}  # fmt: skip


def test_open_causes_are_a_condition_until_the_next_result() -> None:
    unused: Any = None
    save("orders", [], causes=[cause("warning", 2), cause("info", 9)])
    save("refunds", [], causes=[cause("critical", 1)])
    [found] = CONDITIONS.evaluate(unused)
    assert (found.name, found.severity, found.count) == ("reconciliation_findings", Severity.CRITICAL, 2)
    assert [(fact["output"], fact["findings"]) for fact in found.evidence] == [("refunds", 1), ("orders", 2)]
    for output in ("orders", "refunds"):
        save(output, [])
    assert list(CONDITIONS.evaluate(unused)) == []
