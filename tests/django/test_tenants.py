"""Which ledger a search path leads to: one that check-back finds, or a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import pytest
from django.core.management import call_command
from django.db import connections, transaction
from django.db.utils import IntegrityError

from outbox.contrib.django import publish, run_check_back
from outbox.contrib.django.models import LedgerEntry, LedgerIdentity
from outbox.errors import ConfigurationError
from tests.django.shop.models import Order
from tests.django.state import decisions
from tests.django.support import end_messages_lost
from tests.django.test_ledger import execute, order_paid

pytestmark = pytest.mark.usefixtures("empty_log")


@pytest.fixture
def tenant() -> Iterator[str]:
    """A schema with a ledger of its own beside the one in `public`."""
    statements = (
        "CREATE SCHEMA tenant",
        "CREATE TABLE tenant.outbox_ledger (LIKE public.outbox_ledger INCLUDING ALL)",
        "CREATE TABLE tenant.outbox_ledger_identity (LIKE public.outbox_ledger_identity INCLUDING ALL)",
        "INSERT INTO tenant.outbox_ledger_identity (singleton, ledger_id) VALUES (true, gen_random_uuid())",
    )
    for statement in statements:
        execute("default", statement)
    yield "tenant"
    connections["default"].close()
    execute("default", "DROP SCHEMA tenant CASCADE")


def test_a_ledger_that_only_the_search_path_of_a_request_reaches_is_refused(tenant: str) -> None:
    order_paid("default", "shared")
    execute("default", f"SET search_path = {tenant}, public")
    with pytest.raises(ConfigurationError, match=r"search_path.*'default'.*only in one schema"):
        order_paid("default", "tenant's")
    execute("default", "SET search_path = public")
    order_paid("default", "shared again")
    run_check_back()
    assert decisions() == {"shared": "C", "shared again": "C"}
    assert set(Order.objects.values_list("number", flat=True)) == {"shared", "shared again"}


@pytest.mark.parametrize("table", ["outbox_ledger", "outbox_ledger_identity"])
def test_half_a_ledger_in_the_schema_of_a_tenant_is_refused(tenant: str, table: str) -> None:
    execute("default", f"DROP TABLE {tenant}.{table}")
    order_paid("default", "shared")
    execute("default", f"SET search_path = {tenant}, public")
    with pytest.raises(ConfigurationError, match="search_path"):
        order_paid("default", "tenant's")
    execute("default", "SET search_path = public")
    run_check_back()
    assert decisions() == {"shared": "C"}


def test_a_shared_ledger_serves_every_search_path(tenant: str) -> None:
    for table in ("outbox_ledger", "outbox_ledger_identity"):
        execute("default", f"DROP TABLE {tenant}.{table}")
    execute("default", f"SET search_path = {tenant}, public")
    order_paid("default", "tenant's")
    run_check_back()
    assert decisions() == {"tenant's": "C"}


@pytest.fixture
def alias_of_a_schema() -> Iterator[str]:
    """An alias whose connections find a schema of their own, migrated as any other database."""
    execute("default", "CREATE SCHEMA branch")
    before = dict(connections.settings["other"])
    own = {**connections.settings["default"], "OPTIONS": {"options": "-c search_path=branch"}}
    connections["other"].close()
    for settings in (connections.settings["other"], connections["other"].settings_dict):
        settings.update(own)
    call_command("migrate", database="other", run_syncdb=True, verbosity=0)
    yield "other"
    connections["other"].close()
    for settings in (connections.settings["other"], connections["other"].settings_dict):
        settings.clear()
        settings.update(before)
    execute("default", "DROP SCHEMA branch CASCADE")


def test_an_alias_for_each_schema_has_a_ledger_of_its_own(alias_of_a_schema: str) -> None:
    order_paid(alias_of_a_schema, "branch's")
    run_check_back()
    assert decisions() == {"branch's": "C"}
    assert not LedgerEntry.objects.exists()
    assert LedgerEntry.objects.using(alias_of_a_schema).count() == 1


def test_each_schema_guards_its_own_ledger(alias_of_a_schema: str) -> None:
    def ids() -> list[UUID]:
        return [LedgerIdentity.objects.using(alias).get().ledger_id for alias in ("default", alias_of_a_schema)]

    shared, own = ids()
    execute("default", "TRUNCATE branch.outbox_ledger")
    assert ids()[0] == shared
    assert ids()[1] != own
    order_paid(alias_of_a_schema, "branch's")
    with pytest.raises(IntegrityError, match="may still be asked about"):
        execute("default", "DELETE FROM branch.outbox_ledger")


def test_the_path_can_change_between_two_publish_calls_of_one_transaction(tenant: str) -> None:
    with end_messages_lost(), transaction.atomic():
        publish("orders", {}, key="first")
        execute("default", f"SET LOCAL search_path = {tenant}, public")
        with pytest.raises(ConfigurationError, match="search_path"):
            publish("orders", {}, key="second")
    run_check_back()
    assert decisions() == {"first": "R"}


def test_a_known_ledger_is_not_looked_up_again_and_a_failing_look_up_stops_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    order_paid("default", "first")
    settings = connections.settings["default"]
    name, settings["NAME"] = settings["NAME"], "not-there"
    try:
        order_paid("default", "second")
        assert "could not be read on another connection" not in caplog.text
        execute("default", "TRUNCATE outbox_ledger")
        order_paid("default", "third")
        assert "could not be read on another connection" in caplog.text
    finally:
        settings["NAME"] = name
    run_check_back()
    assert decisions() == {"first": None, "second": None, "third": "C"}
