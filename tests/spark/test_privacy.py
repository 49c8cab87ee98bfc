"""Permissions of the files of a run, and masked fields in its texts."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from spark.common.errors import RulesInvalid
from spark.rules import file as rules_file
from spark.rules import masking
from tests.spark.conftest import Reconciler
from tests.spark.world import RULES, START, Order, World

SECRET = "ann@example.org"


def permissions(folder: Path) -> tuple[set[str], set[str]]:
    """Those of all folders below and with `folder`, and those of all files."""
    found: tuple[set[str], set[str]] = (set(), set())
    for path in (folder, *folder.rglob("*")):
        found[path.is_file()].add(oct(stat.S_IMODE(path.stat().st_mode)))
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_output_is_for_its_owner_or_for_whom_the_rules_say(reconcile: Reconciler, world: World, tmp_path: Path) -> None:
    world.add(Order(number=1))
    world.pay(Order(number=2))
    text = RULES.format(extra="", groups="")
    reconcile.run(rules=reconcile.rules(text=text))
    assert permissions(tmp_path / "out") == ({"0o700"}, {"0o600"})

    reconcile.output = "shared"
    reconcile.run(rules=reconcile.rules(text=text + '[output]\nmode = "0640"\n'))
    assert permissions(tmp_path / "shared") == ({"0o750"}, {"0o640"})


def test_permissions_that_make_no_sense(tmp_path: Path) -> None:
    for mode in ("0400", "rw", "0755"):
        text = RULES.format(extra="", groups="") + f'[output]\nmode = "{mode}"\n'
        with pytest.raises(RulesInvalid, match=r"output\.mode: must let the owner read and write"):
            rules_file.parse(text, environment={"RECONCILE_APP": "", "RECONCILE_BROKER": ""})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_masked_fields_are_compared_and_shown_nowhere(reconcile: Reconciler, world: World, tmp_path: Path) -> None:
    world.app.execute("ALTER TABLE orders_order ALTER customer DROP NOT NULL")
    for number, theirs in ((1, SECRET), (2, "bob@example.org"), (3, SECRET)):
        order = Order(number=number)
        world.pay(order)
        content = {"customer": theirs, "total": "12.50", "paid_at": START.isoformat(), "buyer": {"mail": theirs}}
        log_id = world.send(order, body=json.dumps(content).encode())
        world.fail("logistics", log_id, 1, f"no such mailbox: {SECRET}", START)
        world.check(order.message_id, "UNKNOWN", f"no row of {SECRET}", START)
    world.send(Order(number=3), body=f'{{"customer": "{SECRET}", "total": '.encode())
    world.pay(Order(number=4))
    world.send(Order(number=4), body=f'{{"customer": "{SECRET}", "total": "{SECRET}", "paid_at": null}}'.encode())
    world.app.execute("UPDATE orders_order SET customer = %s", [SECRET])
    result = reconcile.run(rules=reconcile.rules(groups=(), extra='mask = ["customer", "mail", "total"]'))
    assert reconcile.findings(result) == [("2", "", "MISMATCH"), ("3", "", "UNREADABLE"), ("4", "", "UNREADABLE")]
    rows = {row["key"]: row for row in reconcile.rows(result)}
    assert json.loads(rows["2"]["row"])["customer"] == masking.HIDDEN
    assert json.loads(rows["2"]["body"]) == {
        "customer": masking.HIDDEN,
        "total": masking.HIDDEN,
        "paid_at": START.isoformat(),
        "buyer": {"mail": masking.HIDDEN},
    }
    assert rows["3"]["body"] == masking.NOT_JSON
    for path in (tmp_path / "out").rglob("*"):
        assert path.is_dir() or b"example.org" not in path.read_bytes(), path
    shown = [str(value) for row in rows.values() for value in row.values()]
    assert not [value for value in shown if "example.org" in value], "Parquet compresses what it holds"


def test_what_is_not_masked_stays_as_it_was_written() -> None:
    names = ["email", "buyer.name"]
    hidden = f'"{masking.HIDDEN}"'
    expected = {
        '{"email": "a", "total": 12.50,  "x": 1, "x": 2}': '{"email": H, "total": 12.50,  "x": 1, "x": 2}',
        '{"list": [{"email": {"a": [1]}}, "email"], "b": {}}': '{"list": [{"email": H}, "email"], "b": {}}',
        '{"buyer": {"name": "x"}, "name": "y"}': '{"buyer": {"name": H}, "name": "y"}',
        ' {"em\\u0061il" : null , "e": []} ': ' {"em\\u0061il" : H , "e": []} ',
        "[[], 1, true]": "[[], 1, true]",
        "12.50": "12.50",
    }
    for text, shown in expected.items():
        assert masking.masked(text, names) == shown.replace("H", hidden)
    for text in ('{"email": "a"', '{"email": "a"} {"email": "b"}', "", "[" * 100_000, '{"a": "x', "{1: 2}", "x"):
        assert masking.masked(text, names) == masking.NOT_JSON


def test_a_key_cannot_be_masked() -> None:
    text = RULES.format(extra='mask = ["id"]', groups="")
    with pytest.raises(RulesInvalid, match=r"rule\['order-paid'\]\.mask: the key cannot be masked"):
        rules_file.parse(text, environment={"RECONCILE_APP": "", "RECONCILE_BROKER": ""})
