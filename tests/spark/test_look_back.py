"""A chain of incremental runs sees changes of judged rows only when it looks back."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from spark.cli import parser
from spark.common.errors import UsageProblem
from spark.common.options import LookBack, RunOptions
from spark.rules.file import parse
from spark.stages import prepare
from tests.spark.conftest import Reconciler
from tests.spark.world import RULES, START, Order, World

pytestmark = pytest.mark.timeout(900)
HOUR = timedelta(hours=1)
FAULTS = {
    ("50", "", "LOST"),
    ("3", "logistics", "DUPLICATE"),
    ("4", "", "MISMATCH"),
    ("5", "logistics", "UNDELIVERED"),
    ("6", "", "MISMATCH"),
}


def change_what_was_judged(world: World) -> None:
    """A backdated row, a backdated effect, and a row, an effect and a body that were changed."""
    world.pay(Order(number=50))
    world.effect("logistics", 3, START + timedelta(seconds=5))
    world.app.execute("UPDATE orders_order SET total = 99 WHERE id = 4")
    world.app.execute("DELETE FROM logistics_shipment WHERE order_id = 5")
    body = Order(number=6).body.replace(b"12.50", b"12.51")
    world.broker.execute("UPDATE commit_log SET body = %s WHERE key = '6'", [body])


def chain(reconcile: Reconciler, world: World, extra: str = "") -> None:
    """A clean run, and changes after its end."""
    reconcile.rules(groups=("logistics",), extra=extra)
    world.add(*(Order(number=number) for number in range(1, 8)))
    world.add(Order(number=90, at=START + 2 * HOUR))
    assert reconcile.findings(reconcile.run()) == []
    change_what_was_judged(world)


@pytest.mark.slow
def test_a_look_back_sees_what_a_full_run_sees(reconcile: Reconciler, world: World) -> None:
    chain(reconcile, world)
    without = reconcile.run()
    assert reconcile.findings(without) == []
    page = (reconcile.folder / "out" / "report.html").read_text()
    assert "judged the rows from <b>the beginning</b>" in page, "the first run of a chain has judged everything"
    looked = reconcile.run(look_back=LookBack(30 * 365 * 86_400))
    assert set(reconcile.findings(looked)) == FAULTS
    (rule,) = looked["rules"]
    assert rule["looked_back"] == {"at": rule["until"], "from": rule["since"]}
    page = (reconcile.folder / "out" / "report.html").read_text()
    assert f"judged the rows from <b>{rule['since'][:10]}" in page
    assert set(reconcile.findings(reconcile.run())) == FAULTS, "they stay open"
    with pytest.raises(UsageProblem, match="no rule says how far to look back: write look_back"):
        reconcile.run(look_back=LookBack())


@pytest.mark.soak
def test_a_look_back_is_due_by_the_rule(reconcile: Reconciler, world: World) -> None:
    """A run looks back once in its time, and no further than its span. The page names the span."""
    chain(reconcile, world)
    path = reconcile.folder / "reconcile.toml"
    text = path.read_text()
    path.write_text(
        text.replace('late_after = "5m"', 'late_after = "5m"\nlook_back = "24000d"\nlook_back_every = "2d"')
    )
    assert reconcile.findings(reconcile.run()) == [], "the first run has looked at everything a moment ago"
    result = json.loads((reconcile.folder / "out" / "result.json").read_text())
    result["rules"][0]["looked_back"]["at"] = (START + HOUR).isoformat()
    (reconcile.folder / "out" / "result.json").write_text(json.dumps(result))
    due = reconcile.run()
    assert set(reconcile.findings(due)) == FAULTS
    world.app.execute("UPDATE orders_order SET total = 99 WHERE id = 7")
    assert set(reconcile.findings(reconcile.run())) == FAULTS, "none is due"
    near = reconcile.run(look_back=LookBack(3600))
    assert set(reconcile.findings(near)) == FAULTS, "order 7 is older than that"
    assert set(reconcile.findings(reconcile.run(full=True))) == FAULTS | {("7", "", "MISMATCH")}


def test_the_command_takes_a_duration_or_the_rules(capsys: pytest.CaptureFixture[str]) -> None:
    given = parser().parse_args
    assert given(["run"]).look_back is None
    assert given(["run", "--look-back"]).look_back == LookBack()
    assert given(["run", "--look-back", "7d"]).look_back == LookBack(7 * 86_400)
    with pytest.raises(SystemExit):
        given(["run", "--look-back", "soon"])
    assert "write a number and a unit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "hours"), [("", 24), ('bucket = "1h"', 1), ('bucket = "1h"\nlook_back_every = "6h"', 6)]
)
def test_one_setting_schedules_a_look_back(extra: str, hours: int) -> None:
    """By checksums, it is cheap enough for every hour."""
    text = RULES.format(extra=f'look_back = "7d"\n{extra}', groups="")
    (rule,) = parse(text, environment={"RECONCILE_APP": "dbname=a", "RECONCILE_BROKER": "dbname=b"}).rules
    assert (rule.look_back_seconds, rule.look_back_every_seconds) == (7 * 86_400, hours * 3_600)


def test_a_rule_without_look_back_runs_without_it() -> None:
    text = RULES.format(extra='look_back = "7d"', groups="")
    second = text[text.index("[[rule]]") :].replace('name = "order-paid"', 'name = "other"').replace("look_back", "# ")
    environment = {"RECONCILE_APP": "dbname=a", "RECONCILE_BROKER": "dbname=b"}
    looking, other = parse(text + second, environment=environment).rules
    options = RunOptions(rules=Path("reconcile.toml"), output="out", look_back=LookBack())
    assert prepare._look_back(looking, options, START, None) == timedelta(days=7)
    assert prepare._look_back(other, options, START, None) is None
