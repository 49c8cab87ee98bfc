"""A suspect is dismissed by evidence alone: databases whose settings or indexes hide it from the second look."""

from __future__ import annotations

import pytest

from spark.common.errors import RunIncomplete
from tests.spark.conftest import Reconciler
from tests.spark.world import RULES, START, World

pytestmark = pytest.mark.timeout(300)
KEYS = ["straße", "\\x", "a\\'b", "naïve \\\\ 'quoted'"]


def text_keys(world: World, keys: list[str]) -> None:
    """Orders without messages, whose keys are texts."""
    world.app.execute("ALTER TABLE orders_order ALTER id TYPE text")
    for key in keys:
        world.app.execute("INSERT INTO orders_order VALUES (%s, 'x', 1, 'paid', %s, %s)", [key, START, START])


@pytest.mark.soak
def test_settings_of_the_database_hide_no_suspect(reconcile: Reconciler, world: World) -> None:
    """Each hides a part of KEYS: the letters that LATIN1 writes otherwise, and the backslashes."""
    reconcile.rules(text=RULES.format(extra="allow_empty = true", groups=""))
    text_keys(world, KEYS)
    for connection in (world.app, world.broker):
        for setting in ("client_encoding = 'LATIN1'", "standard_conforming_strings = off"):
            connection.execute(f'ALTER DATABASE "{connection.info.dbname}" SET {setting}')
    expected = {(key, "", "LOST") for key in KEYS}
    assert set(reconcile.findings(reconcile.run())) == expected
    assert set(reconcile.findings(reconcile.run())) == expected, "carried over, and found again"


@pytest.mark.slow
def test_what_is_there_but_not_found_by_its_key_makes_the_run_incomplete(reconcile: Reconciler, world: World) -> None:
    """As with an index whose collation changed beneath it: a lookup by key finds nothing, reading the table does."""
    text = RULES.format(extra="allow_empty = true", groups="").replace('key = "id"', 'key = "shop_key(id)"')
    reconcile.rules(text=text)
    text_keys(world, ["1", "2"])
    world.app.execute("CREATE FUNCTION shop_key(text) RETURNS text IMMUTABLE LANGUAGE sql AS $$ SELECT 'old ' || $1 $$")
    world.app.execute("CREATE INDEX orders_key ON orders_order (shop_key(id))")
    world.app.execute(
        "CREATE OR REPLACE FUNCTION shop_key(text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS "
        "$$ BEGIN RETURN 'new ' || $1; END $$"
    )
    world.app.execute(f'ALTER DATABASE "{world.app.info.dbname}" SET enable_seqscan = off')
    with pytest.raises(
        RunIncomplete, match=r"2 suspects of rule 'order-paid'.*'new 1'.*a look-up by key finds nothing.*REINDEX"
    ):
        reconcile.run()
    assert not (reconcile.folder / "out" / "result.json").exists()
    world.app.execute("REINDEX INDEX orders_key")
    assert set(reconcile.findings(reconcile.run())) == {("new 1", "", "LOST"), ("new 2", "", "LOST")}
