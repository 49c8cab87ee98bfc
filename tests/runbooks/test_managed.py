"""A role as managed services give it: no superuser, the owner of its databases."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents import DOCS, blocks
from tests.runbooks.machine import Machine
from tests.support import eventually

pytestmark = pytest.mark.timeout(300)
PAGE = DOCS / "operations" / "connections.md"


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A server with two empty databases, whose role `shop` is made by the page."""
    with tempfile.TemporaryDirectory(prefix="rb-", ignore_cleanup_errors=True) as folder:
        made = Machine(Path(folder))
        try:
            made.start_server()
            made.create_databases()
            yield made
        finally:
            made.stop()


@pytest.mark.slow
def test_a_role_without_superuser_rights_installs_and_runs_everything(machine: Machine) -> None:
    _of_the_pooler, role, install, examine, drain = blocks(PAGE, "sh")
    machine.bash(role)
    machine.write_environment(
        **{
            name: re.sub("//postgres@", "//shop@", machine.environment()[name])
            for name in ("APPLICATION_URL", "OUTBOX_BROKER_URL", "ADMIN_URL")
        }
    )
    assert machine.ask(
        "OUTBOX_BROKER_URL", "SELECT current_user::text, usesuper FROM pg_user WHERE usename = current_user"
    ) == [("shop", False)]
    machine.bash("manage.py migrate --run-syncdb")
    machine.bash(install)
    machine.bash("systemctl start shop-worker shop-web")
    machine.wait_for_orders()
    # Until a process has led the broker for the first time, the doctor reports that none leads.
    eventually(lambda: bool(machine.effects()), within_seconds=90, what=machine.logs)
    machine.bash(examine, codes=(0, 1))
    # The parameters of the page about sizing are set by the owner of the tables.
    of_broker, of_application = [code for code in blocks(DOCS / "operations" / "sizing.md", "sql") if "ALTER" in code]
    machine.bash(f'psql "$OUTBOX_BROKER_URL" --set=ON_ERROR_STOP=1 <<"END"\n{of_broker}END')
    machine.bash(f'psql "$APPLICATION_URL" --set=ON_ERROR_STOP=1 <<"END"\n{of_application}END')
    machine.bash("manage.py outbox_audit")
    machine.bash("manage.py outbox_audit compare")
    shown = machine.bash("manage.py outbox_status", codes=(0, 1))
    assert "permission denied" not in shown
    orders = machine.assert_each_order_has_one_effect()
    machine.bash("systemctl stop shop-worker")
    machine.bash(drain)
    machine.bash("manage.py outbox_install --drop --force --no-input")
    assert len(orders) >= 20
