"""Known findings: shown as acknowledged until their date, and counted apart from the others."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from spark import pipeline
from spark.common.errors import RulesInvalid
from spark.rules import file as rules_file
from tests.spark.conftest import Reconciler
from tests.spark.world import RULES, START, Order, World

KNOWN = """
[[acknowledge]]
rule = "order-paid"
key = "1"
class = "LATE"
until = 2999-12-31
reason = "the broker was down"
by = "ann"

[[acknowledge]]
rule = "order-paid"
key = "2"
class = "LOST"
group = ""
until = {until}
reason = "sent by hand"
by = "bob"
"""


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_what_is_acknowledged_is_shown_and_not_counted(reconcile: Reconciler, world: World, tmp_path: Path) -> None:
    """LATE never ends by itself; once acknowledged, it must not hide new findings."""
    late = Order(number=1)
    world.pay(late)
    world.send(late, decided_at=START + timedelta(hours=1))
    world.pay(Order(number=2))
    reconcile.rules(text=RULES.format(extra="", groups=KNOWN.format(until="2020-01-01")))
    first = reconcile.run(metrics=tmp_path / "outbox.prom")
    assert (first["status"], first["faults"], first["new_faults"], first["acknowledged"]) == ("findings", 1, 1, 1)
    assert (
        "acknowledgement of LOST '2' has ended (by bob until 2020-01-01: sent by hand)" in first["rules"][0]["notes"][0]
    )
    shown = {row["key"]: row["acknowledged"] for row in reconcile.rows(first)}
    assert shown == {"1": "by ann until 2999-12-31: the broker was down", "2": None}
    metrics = (tmp_path / "outbox.prom").read_text()
    assert all(
        f'outbox_reconcile_{name}{{rules="reconcile"}} 1\n' in metrics for name in ("new_faults", "acknowledged")
    )
    reconcile.rules(text=RULES.format(extra="", groups=KNOWN.format(until="2999-01-01")))
    second = reconcile.run()
    assert (second["status"], second["faults"], second["new_faults"], second["acknowledged"]) == ("clean", 0, 0, 2)
    assert pipeline.exit_code(second) == 0
    assert [each["open"] for each in second["last_runs"]] == [{"LOST": 1}, {}]
    assert {name: second["totals"][name] for name in ("LATE", "LOST")} == {"LATE": 1, "LOST": 1}, "classified as ever"
    report = (reconcile.folder / "out" / "report.html").read_text()
    assert "by bob until 2999-01-01: sent by hand" in report
    assert second["rules"][0]["rows_read"] < first["rules"][0]["rows_read"], "no rule has changed"


def test_an_acknowledgement_says_who_and_why_and_until_when() -> None:
    text = RULES.format(
        extra="", groups='[[acknowledge]]\nrule = "order"\nkey = "1"\nclass = "PENDING"\nuntil = "soon"\n'
    )
    environment = {"RECONCILE_APP": "", "RECONCILE_BROKER": ""}
    with pytest.raises(RulesInvalid) as raised:
        rules_file.parse(text, environment=environment)
    problems = "\n".join(raised.value.problems)
    for expected in (
        "no rule 'order'; use one of: order-paid",
        "unknown value 'PENDING'; use one of: ORPHAN, ",
        "not a date: 'soon'; write until = 2025-12-31",
        "reason: missing",
        "by: missing",
    ):
        assert expected in problems


ENVIRONMENT = {"RECONCILE_APP": "", "RECONCILE_BROKER": ""}


def test_a_missing_end_is_called_missing() -> None:
    text = RULES.format(extra="", groups=KNOWN.format(until="2020-01-01").replace("until = 2999-12-31\n", ""))
    with pytest.raises(RulesInvalid) as raised:
        rules_file.parse(text, environment=ENVIRONMENT)
    assert raised.value.problems == [
        "acknowledge[1].until: missing; write until = 2025-12-31 (to the end of that day, UTC)."
    ]


@pytest.mark.parametrize("until", ["9999-12-31", "2027-02-01T00:00:00+00:00"])
def test_the_end_is_shown_as_it_was_declared(until: str) -> None:
    text = RULES.format(extra="", groups=KNOWN.format(until=until))
    assert rules_file.parse(text, environment=ENVIRONMENT).acknowledged[1].text == f"by bob until {until}: sent by hand"


def test_a_finding_whose_key_is_empty_or_blank_can_be_acknowledged() -> None:
    text = RULES.format(extra="", groups=KNOWN.format(until="2020-01-01"))
    text = text.replace('key = "1"', 'key = ""').replace('key = "2"', 'key = " "')
    assert [each.key for each in rules_file.parse(text, environment=ENVIRONMENT).acknowledged] == ["", " "]
    for given, problem in (("key = 1", "must be a text, got 1"), ("", "missing")):
        with pytest.raises(RulesInvalid, match=rf"acknowledge\[1\]\.key: {problem}"):
            rules_file.parse(text.replace('key = ""', given), environment=ENVIRONMENT)
