"""A chain of incremental runs sees changes of judged rows when it looks back: over a day by default."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from spark.cli import parser
from spark.common.options import RunOptions
from spark.rules.file import parse
from spark.stages import prepare
from spark.stages.prepare import with_look_backs
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
def test_a_chain_looks_back_over_a_day_by_default(reconcile: Reconciler, world: World) -> None:
    """A row and an effect that were written with an older time are found by the next run, if a day is enough."""
    reconcile.rules(groups=("logistics",))
    now = datetime.now(UTC)
    world.add(*(Order(number=number, at=now - HOUR) for number in range(1, 5)))
    assert reconcile.findings(reconcile.run()) == []
    late = now - timedelta(minutes=25)
    world.pay(Order(number=50, at=late))
    world.pay(Order(number=51, at=late - timedelta(days=2)))
    world.effect("logistics", 3, late)
    found = reconcile.run()
    assert set(reconcile.findings(found)) == {("50", "", "LOST"), ("3", "logistics", "DUPLICATE")}
    assert set(reconcile.findings(reconcile.run(look_back=3 * 86_400))) == {
        ("50", "", "LOST"), ("51", "", "LOST"), ("3", "logistics", "DUPLICATE"),
    }  # fmt: skip


@pytest.mark.slow
def test_a_look_back_sees_what_a_full_run_sees(reconcile: Reconciler, world: World) -> None:
    chain(reconcile, world, 'look_back = "0s"')
    without = reconcile.run()
    assert reconcile.findings(without) == []
    page = (reconcile.folder / "out" / "report.html").read_text()
    assert "judged the rows from <b>the beginning</b>" in page, "the first run of a chain has judged everything"
    looked = reconcile.run(look_back=30 * 365 * 86_400)
    assert set(reconcile.findings(looked)) == FAULTS
    (rule,) = looked["rules"]
    assert rule["looked_back"] == {"at": rule["until"], "from": rule["since"]}
    page = (reconcile.folder / "out" / "report.html").read_text()
    assert f"judged the rows from <b>{rule['since'][:10]}" in page
    assert set(reconcile.findings(reconcile.run())) == FAULTS, "they stay open"


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
    near = reconcile.run(look_back=3600)
    assert set(reconcile.findings(near)) == FAULTS, "order 7 is older than that"
    assert set(reconcile.findings(reconcile.run(full=True))) == FAULTS | {("7", "", "MISMATCH")}


def test_the_command_takes_a_duration_or_the_rules(capsys: pytest.CaptureFixture[str]) -> None:
    given = parser().parse_args
    assert given(["run"]).look_back is None
    assert given(["run", "--look-back"]).look_back == 0.0
    assert given(["run", "--look-back", "7d"]).look_back == 7 * 86_400
    with pytest.raises(SystemExit):
        given(["run", "--look-back", "soon"])
    assert "write a number and a unit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "hours"),
    [
        ("", 24),
        ('bucket = "1h"', 1),
        ('bucket = "1h"\nlook_back_every = "6h"', 6),
        ('bucket = "1h"\nmessage_when = "true"', 24),
    ],
)
def test_one_setting_schedules_a_look_back(extra: str, hours: int) -> None:
    """By checksums, it is cheap enough for every hour; message_when excludes checksums."""
    text = RULES.format(extra=f'look_back = "7d"\n{extra}', groups="")
    rules = parse(text, environment={"RECONCILE_APP": "dbname=a", "RECONCILE_BROKER": "dbname=b"})
    rule = with_look_backs(rules.rules[0], rules, {})
    assert (rule.look_back_seconds, rule.look_back_every_seconds) == (7 * 86_400, hours * 3_600)


@pytest.mark.parametrize(
    ("written", "given", "last", "hours"),
    [
        ("", {}, 1, 1 + 24),
        ("", {}, 48, 48 + 24),
        ("", {}, None, 1 + 24),
        ('look_back = "0s"', {}, 1, None),
        ('look_back = "0s"', {"look_back": 0.0}, 1, None),
        ('look_back = "0s"', {"look_back": 3_600.0}, 1, 1),
        ('look_back = "7d"', {}, 23, None),
        ('look_back = "7d"', {"look_back": 0.0}, 1, 1 + 7 * 24),
        # A row that was added right after the last look back, as old as the span, is judged by the next one.
        ('look_back = "1d"', {}, 24, 24 + 24),
    ],
)
def test_from_when_a_run_looks_back(
    written: str, given: dict[str, Any], last: float | None, hours: float | None
) -> None:
    """`last` and `hours` are hours before the end of the window: the last look back, and the begin of this one."""
    environment = {"RECONCILE_APP": "dbname=a", "RECONCILE_BROKER": "dbname=b"}
    rules = parse(RULES.format(extra=written, groups=""), environment=environment)
    rule = with_look_backs(rules.rules[0], rules, {})
    options = RunOptions(rules=Path("reconcile.toml"), output="out", **given)
    known = None if last is None else {"looked_back": {"at": (START - last * HOUR).isoformat(), "from": None}}
    since = prepare._look_back(rule, options, START - HOUR, START, known)
    assert since == (None if hours is None else START - hours * HOUR)
