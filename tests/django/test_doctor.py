"""The doctor names what will go wrong, and what to do; listing what is undecided; finding messages by their key."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.db import connections

from outbox import Delivery
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.operations.conditions import Condition, Severity
from outbox.broker.operations.diagnosis import diagnose
from outbox.broker.schema.refusals import naming
from outbox.contrib.django import subscriber
from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.django.operations import doctor
from outbox.contrib.django.operations.doctor import examine
from outbox.retry import RetryPolicy
from tests import pooler
from tests.django.broker_world import NOWHERE, World, new_world
from tests.django.state import execute
from tests.django.support import ended

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers")


@pytest.fixture
def world(databases: None, outbox_settings: Callable[..., None]) -> Iterator[World]:
    """A healthy broker."""
    with new_world(outbox_settings) as world:
        yield world


def found() -> dict[str, Condition]:
    """The findings, by name."""
    return {one.name: one for one in examine() if one.severity}


def test_every_examination_is_reported(world: World) -> None:
    assert {one.name for one in examine() if not one.severity} >= {
        "PostgreSQL version", "fsync", "full_page_writes", "synchronous_commit", "isolation", "autovacuum",
        "pooler", "clock", "timeouts of roles", "grants", "sessions",
        "retention of topics", "retention of the inbox", "check horizon", "ledger of 'default'",
    }  # fmt: skip
    assert {name: one.severity for name, one in found().items()} == {"topics without a group": Severity.WARNING}


def test_the_command(world: World) -> None:
    code, said = ended("outbox_doctor", "--json")
    assert code == 1
    first = json.loads(said)[0]
    assert (first["name"], first["severity"]) == ("topics without a group", "warning")
    assert "orders" in first["meaning"] and "If no worker has run yet, start one" in first["next_step"]
    _, said = ended("outbox_doctor")
    assert "WARNING topics without a group: " in said and "OK fsync: on" in said


def test_declarations(world: World) -> None:
    world.subscribe()
    names = found()
    assert names["no_worker"].evidence[0]["group"] == "effects"
    assert "orders" not in names["topics without a group"].meaning.split(", ")
    assert "payments" in names["topics without a group"].meaning
    world.sql("UPDATE outbox.topic SET deleted_at = now() WHERE name = 'payments'")
    assert "payments" not in found()["topics without a group"].meaning


def test_retention(world: World, outbox_settings: Callable[..., None]) -> None:
    @subscriber("orders", group="effects", retry=RetryPolicy(delays_seconds=[86400.0], max_attempts=20))
    def effect(delivery: Delivery) -> None: ...

    world.sql("UPDATE outbox.topic SET retention_seconds = 60 WHERE name = 'payments'")
    names = found()
    assert "payments" in names["retention of topics"].meaning and "payments" in names["check horizon"].meaning
    assert names["retention of the inbox"].severity is Severity.WARNING
    outbox_settings(INBOX_RETENTION_SECONDS=29 * 24 * 3600)
    [compared] = [one for one in examine() if one.name == "retention of the inbox"]
    assert compared.severity is Severity.OK and "pruning keeps" in compared.meaning


def test_ledgers(world: World, settings: Any) -> None:
    def ledger_id(alias: str) -> Any:
        [(found,)] = execute("SELECT ledger_id FROM outbox_ledger_identity", alias=alias)
        return found

    kept = ledger_id("other")
    try:
        execute("UPDATE outbox_ledger_identity SET ledger_id = %s", ledger_id("default"), alias="other")
        assert "same identity as the ledger of 'default'" in found()["ledger of 'other'"].meaning
        execute("DELETE FROM outbox_ledger_identity", alias="other")
        assert found()["ledger of 'other'"].severity is Severity.CRITICAL
    finally:
        execute("DELETE FROM outbox_ledger_identity", alias="other")
        execute("INSERT INTO outbox_ledger_identity (singleton, ledger_id) VALUES (true, %s)", kept, alias="other")


def test_server_and_role(world: World) -> None:
    name = f"limited_{uuid4().hex}"
    [(database,)] = world.sql("SELECT current_database()")
    world.sql(f'CREATE ROLE "{name}" LOGIN')
    world.stack.callback(world.sql, f'DROP ROLE "{name}"')
    world.stack.callback(world.sql, f'DROP OWNED BY "{name}"')
    world.sql(f'GRANT USAGE ON SCHEMA outbox TO "{name}"')
    world.sql(f'GRANT SELECT ON ALL TABLES IN SCHEMA outbox TO "{name}"')
    world.sql(f'ALTER ROLE "{name}" IN DATABASE "{database}" SET statement_timeout = \'5s\'')
    world.sql("SET default_transaction_isolation = 'repeatable read'")
    world.sql("SET synchronous_commit = off")
    world.sql(f'SET ROLE "{name}"')
    try:
        bad = {one.name: one for one in diagnose(world.run, BrokerDatabase(alias_conninfo("broker"))) if one.severity}
    finally:
        world.sql("RESET ROLE")
    assert "DELETE, INSERT, UPDATE on commit_log" in bad["grants"].meaning
    assert "statement_timeout=5s" in bad["timeouts of roles"].meaning
    assert {"isolation", "synchronous_commit", "sessions"} <= set(bad)


def test_a_missing_right_is_no_fault_of_the_settings(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def refused() -> Iterator[Executor]:
        with naming("the request", "outbox"):
            yield world.run

    name = f"limited_{uuid4().hex}"
    world.sql(f'CREATE ROLE "{name}"')
    world.stack.callback(world.sql, f'DROP ROLE "{name}"')
    monkeypatch.setattr(doctor, "broker_executor", refused)
    world.sql(f'SET ROLE "{name}"')
    world.stack.callback(world.sql, "RESET ROLE")
    found = {one.name: one for one in examine()}
    assert "settings" not in found
    assert "outbox_doctor --for" in str(found["unreachable"].evidence)


def test_the_next_step_for_a_ledger_fits_the_error(world: World, settings: Any) -> None:
    kept = dict(connections["other"].settings_dict)
    name = f"limited_{uuid4().hex}"
    world.sql(f'CREATE ROLE "{name}" LOGIN')
    world.stack.callback(world.sql, f'DROP ROLE "{name}"')
    step = {}
    try:
        for fault, changes in {
            "login": {"USER": "nobody_here"},
            "right": {"USER": name},
            "table": {"NAME": "postgres"},
        }.items():
            connections["other"].settings_dict.update({**kept, **changes})
            connections.settings["other"].update({**kept, **changes})
            step[fault] = found()["ledger of 'other'"].next_step
    finally:
        connections["other"].settings_dict.update(kept)
        connections.settings["other"].update(kept)
    assert "the login of this alias" in step["login"] and "migrate" not in step["login"]
    assert "outbox_doctor --for work" in step["right"]
    assert re.search("leads to the database of the application.*migrate", step["table"])


@pytest.mark.skipif(pooler.PROGRAM is None, reason="PgBouncer is not installed")
def test_a_pooler_in_between(world: World) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="outbox-pool-") as folder,
        pooler.pooled(alias_conninfo("broker"), Path(folder), size=2) as through,
    ):
        for listen, severity in (
            (None, Severity.WARNING),
            ("", Severity.OK),
            (through, Severity.WARNING),
            (alias_conninfo("broker"), Severity.OK),
            (NOWHERE, Severity.CRITICAL),
        ):
            database = BrokerDatabase(through, listen_conninfo=listen)
            with database.connect() as connection:
                looked = {one.name: one for one in diagnose(Executor(connection, "outbox"), database)}
            assert looked["pooler"].severity is severity


def test_what_only_informs_is_shown_and_is_no_fault(world: World, settings: Any) -> None:
    @subscriber("orders", group="slow", timeout_seconds=3600)
    def slow(delivery: Delivery) -> None: ...

    world.subscribe("slow", "orders")
    shown = {one.name: one.severity for one in examine()}
    assert shown["check outbox.I035"] is Severity.OK
    assert "check outbox.I035" not in found()
    settings.SILENCED_SYSTEM_CHECKS = ["outbox.I035"]
    assert "check outbox.I035" not in {one.name for one in examine()}
