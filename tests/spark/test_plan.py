"""The plan: a step per finding, as lines for people and for `manage.py outbox_repair`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest

from outbox.contrib.reconciliation import plan as applied
from spark.cli import main
from spark.output import plan
from spark.rules import file as rules_file
from spark.rules.rule import FAULTS
from tests.spark.conftest import Reconciler
from tests.spark.test_processes import ROOT
from tests.spark.world import START, Order, World

pytestmark = pytest.mark.timeout(300)


def planned(reconcile: Reconciler) -> list[dict[str, Any]]:
    """The lines of the plan for the result in force."""
    rules = rules_file.load(reconcile.folder / "reconcile.toml")
    return [json.loads(line) for line in plan.lines(str(reconcile.folder / reconcile.output), rules)]


def actions(reconcile: Reconciler) -> dict[str, str]:
    return {step["key"]: step["action"] for step in planned(reconcile)[1:]}


@pytest.mark.slow
def test_each_finding_is_a_step_and_only_three_classes_do_something(reconcile: Reconciler, world: World) -> None:
    world.add_many(10)
    log_id = world.broker.execute("SELECT log_id FROM commit_log WHERE key = '2'").fetchone()
    assert log_id is not None
    world.kill_letter("points", log_id[0], START)
    world.app.execute("DELETE FROM points_entry WHERE order_id = 2")
    world.broker.execute("DELETE FROM commit_log WHERE key IN ('3', '6')")
    world.app.execute("DELETE FROM points_entry WHERE order_id = 3")
    stuck = Order(number=40)
    world.pay(stuck)
    world.park(stuck.message_id, world.send(stuck, decision=None), START)
    world.app.execute("DELETE FROM orders_order WHERE id = 4")
    world.app.execute("UPDATE orders_order SET total = total + 1 WHERE id = 5")
    # The newest row, so that all these are below the boundary.
    world.add(Order(number=90, at=START + timedelta(hours=1)))
    reconcile.rules(groups=("points",))
    reconcile.run()
    head, *steps = planned(reconcile)
    assert [(step["key"], step["class"], step["action"]) for step in steps] == [
        ("40", "HALF_STUCK", "ask"),
        ("3", "LOST", "publish"),
        ("6", "LOST", "report"),
        ("2", "DEAD", "replay"),
        ("4", "ORPHAN", "report"),
        ("5", "MISMATCH", "report"),
    ], "the most urgent first"
    assert head["rules"]["order-paid"]["when"] == "(paid_at IS NOT NULL)"
    assert len({step["step"] for step in steps}) == 6
    assert steps[2]["why"].startswith("groups have acted on this key. ") and "do not publish" in steps[2]["why"]
    assert all(step["why"] for step in steps if step["action"] == "report")


@pytest.mark.soak
def test_acknowledged_changed_and_doubtful_findings_are_only_reported(reconcile: Reconciler, world: World) -> None:
    known = (
        '[[acknowledge]]\nrule = "order-paid"\nkey = "3"\nclass = "LOST"\nuntil = 2999-12-31\n'
        'reason = "known"\nby = "ann"\n'
    )
    path = reconcile.rules()
    text = path.read_text()
    path.write_text(text + known)
    world.add_many(6)
    world.broker.execute("DELETE FROM commit_log WHERE key IN ('3', '5')")
    reconcile.run()
    assert actions(reconcile) == {"3": "report", "5": "publish"}
    path.write_text(text.replace('grace = "30s"', 'grace = "31s"') + known)
    assert actions(reconcile) == {"3": "report", "5": "report"}
    assert "run the reconciliation again" in planned(reconcile)[1]["why"], "an acknowledged one comes last"


@pytest.mark.soak
def test_an_original_that_arrives_after_the_repair_is_a_duplicate(
    reconcile: Reconciler, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its id is another than the repair's, so only the reconciliation can tell. In between nothing is planned."""
    world.add_many(6)
    world.broker.execute("DELETE FROM commit_log WHERE key = '3'")
    reconcile.run()
    assert actions(reconcile) == {"3": "publish"}
    row = world.app.execute("SELECT total, paid_at FROM orders_order WHERE id = 3").fetchone()
    assert row is not None
    order = Order(number=3, at=row[1], total=row[0])
    world.send(order)
    world.consume_all()
    assert reconcile.run()["status"] == "clean"
    given = ["--rules", str(reconcile.folder / "reconcile.toml"), "--output"]
    assert main(["plan", *given, str(reconcile.folder / reconcile.output)]) == 0
    (head,) = capsys.readouterr().out.splitlines()
    assert json.loads(head)["plan"] == plan.VERSION
    assert main(["plan", *given, str(reconcile.folder / "nowhere")]) == 2
    world.send(Order(number=3, at=row[1], total=row[0]), stored_at=order.at + timedelta(seconds=1))
    world.consume_all()
    assert actions_of(reconcile.run(full=True), reconcile) == {"3": ("DUPLICATE", "report")}


def actions_of(result: dict[str, Any], reconcile: Reconciler) -> dict[str, tuple[str, str]]:
    assert result["status"] == "findings"
    return {step["key"]: (step["class"], step["action"]) for step in planned(reconcile)[1:]}


# The run itself is over; this stands for its exit with findings.
WITH_FINDINGS = """
import subprocess, sys
from pathlib import Path
from types import SimpleNamespace
import django
from django.core.management import call_command
django.setup()
real = subprocess.run
subprocess.run = lambda command, **more: SimpleNamespace(returncode=1) if "run" in command else real(command, **more)
rules, output, plan = sys.argv[1:]
call_command("outbox_reconcile", rules=rules, output=output, plan=Path(plan))
"""


@pytest.mark.slow
def test_manage_py_writes_the_plan_beside_the_run(
    reconcile: Reconciler, world: World, sample_environment: dict[str, str]
) -> None:
    """With the project's databases for the rules, for its owner alone, and the exit code is still that of the run.

    The plan is read as it was written by the part that applies it, which shares no code with the one that makes it.
    """
    reconcile.rules(groups=("points",))
    world.add_many(3)
    world.pay(Order(number=50, at=START + timedelta(milliseconds=20)))
    reconcile.run()
    file = reconcile.folder / "plan.jsonl"
    folder = [str(reconcile.folder / name) for name in ("reconcile.toml", reconcile.output, file.name)]
    variables = {**os.environ, **sample_environment, "DJANGO_SETTINGS_MODULE": "sample_project.settings"}
    command = [sys.executable, "-c", WITH_FINDINGS, *folder]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert f"outbox_repair {file}" in done.stderr
    assert [json.loads(line) for line in file.read_text().splitlines()] == planned(reconcile)
    assert file.stat().st_mode & 0o777 == 0o600
    read = applied.read(file)
    (step,) = read.steps
    assert (step.action, step.key, step.rule, step.finding_class) == ("publish", "50", "order-paid", "LOST")
    assert step.row_at == START + timedelta(milliseconds=20)
    assert read.sources["order-paid"].table == '"orders_order"'
    (effects,) = read.sources["order-paid"].effects
    assert (effects.group, effects.table, effects.key) == ("points", '"points_entry"', '"order_id"')
    assert {action.value for action in applied.RepairAction} == {action.value for action in plan.RepairAction}


def test_every_class_of_faults_has_an_action_or_is_reported() -> None:
    assert {name.value for name in FAULTS} >= set(plan._ACTIONS)


def test_the_head_of_a_plan_has_the_causes_that_are_open() -> None:
    named = {"severity": "critical", "new": 0, "oldest": None}

    def cause(name: str, findings: int, acknowledged: int) -> dict[str, Any]:
        return {"subject": name, "class": name, "findings": findings, "acknowledged": acknowledged, **named}

    causes = [cause("LOST", 3, 1), cause("LATE", 2, 2), cause("RECOVERED", 4, 0), cause("EXPIRED", 1, 0)]
    assert plan.open_causes({"causes": causes}) == [{"subject": "LOST", "class": "LOST", "findings": 2, **named}]
