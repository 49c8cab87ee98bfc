"""Permissions of the files of a run, and masked fields in its texts."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from spark.common.errors import RulesInvalid
from spark.common.store import Store
from spark.judging import masking
from spark.rules import file as rules_file
from tests.spark.conftest import Reconciler
from tests.spark.world import RULES, START, Order, World

SECRET = "ann@example.org"


def test_a_new_output_folder_is_for_its_owner_alone(tmp_path: Path) -> None:
    """An existing folder keeps the permissions that its owner has chosen."""
    (tmp_path / "known").mkdir(mode=0o750)
    for name, mode in (("new", 0o700), ("known", 0o750)):
        Store(str(tmp_path / name)).check_writable()
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode
        assert Store(str(tmp_path / name)).note_of_readers() == ""
    (tmp_path / "known").chmod(0o755)
    assert "every user of this machine can read" in Store(str(tmp_path / "known")).note_of_readers()


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


def test_values_are_masked_at_any_depth() -> None:
    names = ["email", "buyer.name"]
    hidden = f'"{masking.HIDDEN}"'
    expected = {
        '{"email": "a", "total": 12.50,  "x": 1, "x": 2}': '{"email":H,"total":12.5,"x":2}',
        '{"list": [{"email": {"a": [1]}}, "email"], "b": {}}': '{"list":[{"email":H},"email"],"b":{}}',
        '{"buyer": {"name": "x"}, "name": "y"}': '{"buyer":{"name":H},"name":"y"}',
        ' {"em\\u0061il" : null , "e": []} ': '{"email":H,"e":[]}',
        "[[], 1, true]": "[[],1,true]",
        "12.50": "12.5",
        '{"\\udc00": "\\ud800 \\ud83d\\ude00", "email": "x"}': '{"\\udc00":"\\ud800 😀","email":H}',
    }
    for text, shown in expected.items():
        assert masking.masked(text, names) == shown.replace("H", hidden)
        assert masking.masked(text, names).encode()
    for text in ('{"email": "a"', '{"email": "a"} {"email": "b"}', "", "[" * 100_000, '{"a": "x', "{1: 2}", "x"):
        assert masking.masked(text, names) == masking.NOT_JSON


def test_a_key_cannot_be_masked() -> None:
    text = RULES.format(extra='mask = ["id"]', groups="")
    with pytest.raises(RulesInvalid, match=r"rule\['order-paid'\]\.mask: the key cannot be masked"):
        rules_file.parse(text, environment={"RECONCILE_APP": "", "RECONCILE_BROKER": ""})
