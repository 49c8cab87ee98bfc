"""The blocks of docs/operations/restore.md do what the page says, while orders are placed and handled."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runbooks.machine import Machine, binaries, sections, write_programs
from tests.support import eventually

pytestmark = pytest.mark.timeout(300)

DEBIAN = Path("/usr/lib/postgresql/15/bin")
# Each section with blocks, and the test that runs all of them.
SECTIONS = {
    "Dump and load": "test_both_databases_are_dumped_and_loaded",
    "After every restore": "test_both_databases_are_dumped_and_loaded",
    "Restore the broker's database alone": "test_the_broker_alone_is_restored",
    "Restore the broker's schema alone": "test_the_brokers_schema_alone_is_restored",
    "Restore the application's database alone": "test_the_application_alone_is_restored",
    "Go back to a point in time": "test_both_databases_go_back_to_a_point_in_time",
    "Fail over to a standby": "test_a_synchronous_standby_takes_over_under_load",
    "Move the broker's tables to another database": "test_the_brokers_tables_are_moved",
    "Upgrade PostgreSQL": "test_postgresql_is_upgraded",
    "A copy for staging": "test_a_copy_for_staging_does_not_act_for_production",
    "A full disk": "test_a_full_disk_loses_nothing",
}


@pytest.fixture
def new_machine() -> Iterator[Callable[..., Machine]]:
    """A function that makes a machine with an installed shop."""
    made: list[Machine] = []
    # Short: the sockets of the servers are in it.
    with tempfile.TemporaryDirectory(prefix="rb-", ignore_cleanup_errors=True) as folder:

        def make(*, tables: bool = True, **options: Any) -> Machine:
            machine = Machine(Path(folder), **options)
            made.append(machine)
            machine.install(tables=tables)
            return machine

        try:
            yield make
        finally:
            for machine in made:
                machine.stop()


def start(machine: Machine) -> None:
    machine.bash("systemctl start shop-worker shop-web")
    machine.wait_for_orders()
    eventually(machine.effects, within_seconds=60, what=machine.logs)


def compare(machine: Machine) -> dict[str, int]:
    """How many transactions or effects are named, by kind: the block of the page, as JSON."""
    [block] = sections()["After every restore"][:1]
    output = machine.bash(f"{block.strip()} --json 2> /dev/null", codes=(0, 2))
    found = Counter[str]()
    for one in json.loads(output)["found"]:
        found[one["kind"]] += one["missing"]
    return dict(found)


def messages(machine: Machine) -> Counter[str]:
    """The keys of the broker's messages."""
    return Counter(key for (key,) in machine.ask("OUTBOX_BROKER_URL", "SELECT key FROM outbox.commit_log"))


def wait_for_effects(machine: Machine, expected: Counter[str]) -> None:
    eventually(
        lambda: machine.effects() == expected,
        within_seconds=90,
        what=lambda: f"{machine.effects() - expected}, {expected - machine.effects()}\n{machine.logs()}",
    )


def settle(machine: Machine) -> None:
    """The last block: after it, no condition names a transaction."""
    machine.run("After every restore", 1)
    assert compare(machine) == {}


def test_every_block_of_the_page_is_run() -> None:
    with_blocks = {heading for heading, blocks in sections().items() if blocks}
    assert with_blocks == set(SECTIONS)
    assert [name for name in SECTIONS.values() if not callable(globals().get(name))] == []


def properties(machine: Machine) -> list[tuple[Any, ...]]:
    """Owner, rights and settings of each database."""
    return machine.ask(
        "ADMIN_URL",
        "SELECT datname, datdba::regrole::text, encoding, datcollate,"
        " (SELECT array_agg(one::text ORDER BY one::text) FROM unnest(datacl) AS one),"
        " (SELECT array_agg(setrole::regrole || ' ' || setconfig::text) FROM pg_db_role_setting"
        " WHERE setdatabase = pg_database.oid) FROM pg_database WHERE datname IN ('broker', 'shop') ORDER BY 1",
    )


@pytest.mark.slow
def test_both_databases_are_dumped_and_loaded(new_machine: Callable[..., Machine]) -> None:
    machine = new_machine()
    for statement in (
        "CREATE ROLE shop_deploy",
        "ALTER DATABASE broker OWNER TO shop_deploy",
        "REVOKE CONNECT ON DATABASE broker FROM PUBLIC",
        "ALTER ROLE shop_deploy IN DATABASE broker SET role = 'postgres'",
    ):
        machine.bash(f'psql "$ADMIN_URL" --quiet --command="{statement}"')
    before = properties(machine)
    start(machine)
    machine.run("Dump and load", 0)
    machine.wait_for_orders()
    machine.run("Dump and load", 1)
    assert properties(machine) == before and before[0][1] == "shop_deploy"
    machine.wait_for_orders()
    machine.bash("systemctl stop shop-web")
    # Of the orders between the two dumps, the broker's copy has no message.
    orders, kept = Counter(machine.orders()), messages(machine)
    lost = orders - kept
    assert kept - orders == Counter()
    # A lost message was handled before the dump of the application, or never is.
    wait_for_effects(machine, orders - (lost - machine.effects()))
    eventually(lambda: compare(machine).get("ledger", 0) == lost.total(), what=lambda: str(compare(machine)))
    settle(machine)


@pytest.mark.slow
def test_the_broker_alone_is_restored(new_machine: Callable[..., Machine]) -> None:
    machine = new_machine()
    start(machine)
    machine.run("Dump and load", 0)
    machine.wait_for_orders()
    machine.run("Restore the broker's database alone")
    check_a_restored_broker(machine)


@pytest.mark.slow
def test_the_brokers_schema_alone_is_restored(new_machine: Callable[..., Machine]) -> None:
    machine = new_machine()
    start(machine)
    machine.run("Restore the broker's schema alone", 0)
    machine.wait_for_orders()
    machine.bash('psql "$OUTBOX_BROKER_URL" --quiet --command="CREATE TABLE of_another_program (number int)"')
    machine.run("Restore the broker's schema alone", 1)
    assert machine.ask("OUTBOX_BROKER_URL", "SELECT to_regclass('of_another_program') IS NOT NULL") == [(True,)]
    check_a_restored_broker(machine)


def check_a_restored_broker(machine: Machine) -> None:
    """The messages after the dump are named, no other effect is missing, and no effect happens twice."""
    machine.wait_for_orders()
    machine.bash("systemctl stop shop-web")
    orders, kept = Counter(machine.orders()), messages(machine)
    lost = orders - kept
    assert sorted(orders) == sorted(machine.placed()) and lost.total() >= 20
    # A lost message was handled before the restore, or never is.
    effects = orders - (lost - machine.effects())
    wait_for_effects(machine, effects)
    eventually(lambda: compare(machine).get("ledger") == lost.total(), what=lambda: str(compare(machine)))
    settle(machine)


def lost_effects(machine: Machine) -> list[dict[str, Any]]:
    """The evidence of the condition, after a comparison."""
    compare(machine)
    shown = json.loads(machine.bash("manage.py outbox_status --json 2> /dev/null", codes=(0, 1, 2)))
    return [fact for one in shown["conditions"] if one["name"] == "lost_effects" for fact in one["evidence"]]


@pytest.mark.slow
def test_the_application_alone_is_restored(new_machine: Callable[..., Machine]) -> None:
    machine = new_machine()
    start(machine)
    machine.run("Dump and load", 0)
    machine.wait_for_orders()
    machine.run("Restore the application's database alone")
    machine.wait_for_orders()
    machine.bash("systemctl stop shop-web")
    orders, kept = Counter(machine.orders()), messages(machine)
    gone = kept - orders
    assert orders - kept == Counter() and gone.total() >= 20
    eventually(lambda: compare(machine).get("decision") == gone.total(), what=lambda: str(compare(machine)))
    # The condition prints the command that hands out again what the restored inbox does not know.
    for fact in eventually(lambda: lost_effects(machine), within_seconds=60, what=lambda: str(compare(machine))):
        machine.bash(f"{fact['command']} --no-input")
    wait_for_effects(machine, kept)
    settle(machine)


@pytest.mark.slow
def test_both_databases_go_back_to_a_point_in_time(new_machine: Callable[..., Machine]) -> None:
    machine = new_machine()
    machine.run("Go back to a point in time", 0)
    start(machine)
    machine.run("Go back to a point in time", 1)
    machine.wait_for_orders()
    [(target, before)] = machine.ask("APPLICATION_URL", "SELECT now()::text, count(*) FROM shop_order")
    machine.variables["TARGET_TIME"] = target
    machine.wait_for_orders()
    machine.bash('psql "$APPLICATION_URL" -c "DROP TABLE shop_order"')
    machine.run("Go back to a point in time", 2)
    machine.wait_for_orders()
    orders = machine.assert_each_order_has_one_effect()
    assert len(orders) >= before + 20
    assert compare(machine) == {}


@pytest.mark.slow
def test_a_synchronous_standby_takes_over_under_load(new_machine: Callable[..., Machine]) -> None:
    machine = new_machine()
    standby = machine.folder / "volume" / "standby"
    machine.variables |= {"STANDBY_DATA": str(standby), "STANDBY_URL": machine.url("postgres", standby)}
    machine.write_environment(
        ADMIN_URL=machine.url("postgres"),
        APPLICATION_URL=machine.url("shop", machine.data, standby),
        OUTBOX_BROKER_URL=machine.url("broker", machine.data, standby),
    )
    start(machine)
    machine.run("Fail over to a standby", 0)
    eventually(lambda: machine.ask("ADMIN_URL", "SELECT sync_state FROM pg_stat_replication") == [("sync",)])
    machine.wait_for_orders()
    machine.run("Fail over to a standby", 1)
    machine.wait_for_orders()
    orders = machine.assert_each_order_has_one_effect()
    assert set(machine.placed()) - set(orders) == set()
    assert compare(machine) == {}


@pytest.mark.slow
def test_the_brokers_tables_are_moved(new_machine: Callable[..., Machine]) -> None:
    machine = new_machine()
    machine.bash('psql "$ADMIN_URL" -c "CREATE DATABASE broker2"')
    machine.variables["NEW_BROKER_URL"] = machine.url("broker2")
    start(machine)
    before = machine.environment()
    machine.run("Move the broker's tables to another database")
    assert machine.environment()["OUTBOX_BROKER_URL"] == machine.url("broker2")
    # A process that still has the old address fails, and writes nothing.
    late = subprocess.run(
        ["bash", "-c", "manage.py outbox_status --probe"], env=before, capture_output=True, text=True, check=False
    )
    assert late.returncode == 1, late
    machine.wait_for_orders()
    assert machine.assert_each_order_has_one_effect() == sorted(machine.placed())
    assert compare(machine) == {}


@pytest.mark.slow
@pytest.mark.skipif(not DEBIAN.exists(), reason="Debian's package postgresql-15 is not installed")
def test_postgresql_is_upgraded(new_machine: Callable[..., Machine]) -> None:
    machine = new_machine(programs=DEBIAN)
    newer = write_programs(machine.folder / "newer", binaries(), machine.account)
    machine.variables |= {
        "OLD_BIN": str(DEBIAN),
        "NEW_BIN": str(newer),
        "NEW_DATA": str(machine.data.with_name("newer")),
    }
    start(machine)
    [(before,)] = machine.ask("ADMIN_URL", "SHOW server_version_num")
    machine.run("Upgrade PostgreSQL")
    machine.use(binaries())
    machine.wait_for_orders()
    [(after,)] = machine.ask("ADMIN_URL", "SHOW server_version_num")
    assert (before[:2], after[:2]) == ("15", "18")
    assert machine.assert_each_order_has_one_effect() == sorted(machine.placed())
    assert compare(machine) == {}


@pytest.mark.slow
def test_a_copy_for_staging_does_not_act_for_production(new_machine: Callable[..., Machine]) -> None:
    machine = new_machine()
    start(machine)
    machine.bash("systemctl stop shop-web shop-worker")
    # An order that no worker of production has handled yet.
    machine.bash("systemctl start shop-web")
    machine.wait_for_orders(5)
    machine.bash("systemctl stop shop-web")
    waiting = Counter(machine.orders()) - machine.effects()
    assert waiting
    machine.run("Dump and load", 0)
    production = {name: machine.environment()[name] for name in ("APPLICATION_URL", "OUTBOX_BROKER_URL")}
    machine.bash('psql "$ADMIN_URL" -q -c "CREATE DATABASE shop2" -c "CREATE DATABASE broker2"')
    machine.write_environment(
        ADMIN_URL=machine.url("postgres"),
        APPLICATION_URL=machine.url("shop2"),
        OUTBOX_BROKER_URL=machine.url("broker2"),
    )
    machine.bash(
        'pg_restore --dbname="$OUTBOX_BROKER_URL" "$BACKUPS/broker.dump"\n'
        'pg_restore --dbname="$APPLICATION_URL" "$BACKUPS/application.dump"'
    )
    machine.run("A copy for staging")

    identity = "SELECT ledger_id FROM outbox_ledger_identity"
    tables = "SELECT tablename FROM pg_tables WHERE tablename LIKE 'outbox\\_%'"
    filled = [
        name for (name,) in machine.ask("APPLICATION_URL", tables)
        if machine.ask("APPLICATION_URL", f"SELECT count(*) FROM {name}") != [(0,)]
    ]  # fmt: skip
    assert filled == ["outbox_ledger_identity"]
    copy = machine.ask("APPLICATION_URL", identity)
    machine.bash("systemctl start shop-worker")
    before = machine.orders()
    machine.bash("systemctl start shop-web")
    machine.wait_for_orders()
    machine.bash("systemctl stop shop-web")
    # In the copy, orders of its own are handled, and none of production's.
    new = Counter(machine.orders()) - Counter(before)
    old = Counter(before) - waiting
    wait_for_effects(machine, old + new)
    assert messages(machine) == new
    machine.bash("systemctl stop shop-worker")

    machine.write_environment(ADMIN_URL=machine.url("postgres"), **production)
    assert machine.ask("APPLICATION_URL", identity) != copy
    assert Counter(machine.orders()) - machine.effects() == waiting
    assert machine.ask("OUTBOX_BROKER_URL", "SELECT count(*) FROM outbox.consumer") == [(0,)]
    machine.bash("systemctl start shop-worker")
    assert machine.assert_each_order_has_one_effect() == sorted(before)


@pytest.mark.slow
def test_a_full_disk_loses_nothing(new_machine: Callable[..., Machine]) -> None:
    machine = new_machine()
    machine.bash('pg_ctl stop -D "$DATA"')
    volume = machine.folder / "small"
    volume.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200m", "none", volume], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a small file system")
    try:
        machine.own(volume)
        machine.bash(f"cp -a {machine.data} {volume}/data")
        machine.data = volume / "data"
        reserve = {"DATA": str(machine.data), "RESERVE": str(volume / "reserve"), "RESERVE_BYTES": "32M"}
        machine.variables |= reserve
        machine.write_environment(
            ADMIN_URL=machine.url("postgres"),
            APPLICATION_URL=machine.url("shop"),
            OUTBOX_BROKER_URL=machine.url("broker"),
        )
        machine.bash('pg_ctl start -w -D "$DATA" -l "$DATA/log"')
        machine.run("A full disk", 0)
        start(machine)
        told = len(machine.told())
        _fill(volume / "ballast")
        eventually(lambda: [line for line in machine.told()[told:] if not line.endswith(" placed")], within_seconds=90)
        machine.run("A full disk", 1)
        machine.wait_for_orders()
        # It exits with the severity of what it shows.
        machine.run("A full disk", 2, codes=(0, 1, 2))
        orders = machine.assert_each_order_has_one_effect()
        assert set(machine.placed()) - set(orders) == set()
        assert compare(machine) == {}
    finally:
        machine.stop()
        subprocess.run(["umount", "--lazy", volume], check=True)


def _fill(file: Path) -> None:
    """Write until no byte is free."""
    with file.open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(bytes(4096))
    assert shutil.disk_usage(file.parent).free < 4096
