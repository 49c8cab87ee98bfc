"""A broker that is down, forbidden, damaged or stuck: every entry point raises an error that names the next step."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from django.db import connections, transaction
from psycopg.conninfo import conninfo_to_dict

from outbox.broker import embedded
from outbox.contrib import django as package
from outbox.contrib.django import publish, run_check_back, run_prune, subscriber
from outbox.contrib.django.engine import broker as broker_access
from outbox.contrib.django.ledger.ledger_checker import ledger_aliases
from outbox.contrib.django.ledger.pruning import prune_inboxes
from outbox.contrib.django.models import InboxEntry
from outbox.contrib.django.operations.doctor import examine
from outbox.errors import LedgerUnavailable
from outbox.utils.backoff import Backoff
from outbox.utils.ids import uuid7
from tests.databases import drop_databases
from tests.django import entry_points
from tests.django.conftest import BROKER_TEMPLATE, point_alias
from tests.django.state import decisions
from tests.django.support import broker_sql, end_messages_lost
from tests.part_apps import command_files

Fault = Callable[[str], AbstractContextManager[object]]


def alias(**changes: str) -> tuple[dict[str, str], Fault]:
    """Another entry in DATABASES."""
    return changes, lambda url: nullcontext()


def altered(statement: str, **changes: str) -> tuple[dict[str, str], Fault]:
    """Another database; {name} is its name."""

    def alter(url: str) -> AbstractContextManager[object]:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(statement.replace("{name}", str(conninfo_to_dict(url)["dbname"])).encode())
        return nullcontext()

    return changes, alter


@contextmanager
def locked(url: str) -> Iterator[None]:
    """Another session alters tables and does not end; no call waits for long."""
    name = conninfo_to_dict(url)["dbname"]
    with psycopg.connect(url) as connection:
        connection.execute(f"ALTER DATABASE {name} SET lock_timeout = '20ms'".encode())
        connection.commit()
        for (table,) in connection.execute(b"SELECT tablename FROM pg_tables WHERE schemaname = 'outbox'").fetchall():
            connection.execute(f"LOCK TABLE outbox.{table} IN ACCESS EXCLUSIVE MODE".encode())
        yield
        connection.rollback()


EVERY_TABLE = """
DO $$ DECLARE t text; BEGIN
    FOR t IN SELECT tablename FROM pg_tables WHERE schemaname = 'outbox' AND tablename <> 'schema_version'
    LOOP EXECUTE 'DROP TABLE outbox.' || t || ' CASCADE'; END LOOP;
END $$"""
REACH = (
    "cannot be reached: .*(Connection refused|does not exist).*[cC]heck (the broker's conn|that its PostgreSQL runs)"
)
FAULTS: dict[str, tuple[tuple[dict[str, str], Fault], str]] = {
    "away": (alias(HOST="127.0.0.1", PORT="9"), REACH),
    "wrong role": (alias(USER="nobody_here"), REACH),
    "wrong database": (alias(NAME="nowhere"), REACH),
    "no schema": (altered("DROP SCHEMA outbox CASCADE"), "not installed in schema 'outbox'.*run `manage.py migrate"),
    "no tables": (altered(EVERY_TABLE), "not as they were installed .*migrate.*restore"),
    "read-only": (altered("ALTER DATABASE {name} SET default_transaction_read_only = on"), "read-only.*the primary"),
    "no rights": (
        altered("CREATE ROLE {name}_nobody LOGIN", USER="{name}_nobody"),
        "permission denied .*outbox_doctor --for",
    ),
    "locked": ((({}, locked)), "lock timeout.*again|holds a lock .*End the blocking transaction"),
}


# Each entry point waits for the end of its limit.
@pytest.fixture(
    scope="module", params=[pytest.param(one, marks=pytest.mark.slow if one == "locked" else ()) for one in FAULTS]
)
def broken(request: pytest.FixtureRequest, django_db_setup: None, server_url: str) -> Iterator[tuple[str, Any]]:
    """The name of the fault, and the entry in DATABASES that leads to the broker that has it."""
    (changes, fault), _ = FAULTS[request.param]
    name = f"outbox_broken_{os.getpid()}"
    url = embedded.create_database(server_url, name, template=BROKER_TEMPLATE)
    with fault(url):
        yield request.param, (url, {key: value.replace("{name}", name) for key, value in changes.items()})
    drop_databases(server_url, [name])
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"DROP ROLE IF EXISTS {name}_nobody".encode())


@pytest.fixture
def fault(
    broken: tuple[str, Any], application: None, no_subscribers: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The fault that the broker of this test has."""
    subscriber("orders", group="effects", using="default")(lambda given: None)
    # The attempts of a request, without the pauses between them.
    monkeypatch.setattr(
        "outbox.broker.postgres._BACKOFF", Backoff(first_seconds=0.001, longest_seconds=0.001, factor=2)
    )
    name, (url, changes) = broken
    before = dict(connections["broker"].settings_dict)
    point_alias("broker", url)
    for settings in (connections["broker"].settings_dict, connections.settings["broker"]):
        settings.update(changes)
    broker_access.reset_broker()
    yield name
    broker_access.reset_broker()
    connections["broker"].close()
    for settings in (connections["broker"].settings_dict, connections.settings["broker"]):
        settings.update(before)


# With these, every entry point is called; each other fault becomes its error in the same place.
EVERYWHERE = ("away", "no tables", "read-only")


def test_no_entry_point_raises_an_error_of_the_driver(fault: str) -> None:
    wrong = []
    for entry_point in entry_points.ENTRY_POINTS if fault in EVERYWHERE else entry_points.OF_EACH_KIND:
        broker_access.reset_broker()
        done, said = entry_points.say(entry_point)
        if fault == "read-only" and entry_point in (*entry_points.READING, *entry_points.DECLARED):
            continue
        # System checks warn of missing tables, and let `migrate` continue.
        if done and not entry_point.startswith("check "):
            wrong.append(f"{entry_point} should have failed: {said}")
        elif not re.search(FAULTS[fault][1], said, re.DOTALL):
            wrong.append(f"{entry_point} says: {said}")
    assert wrong == []


def test_these_are_all_entry_points() -> None:
    assert {*entry_points.FUNCTIONS, *entry_points.OTHERS} == set(package.__all__)
    lines = (*entry_points.READING, *entry_points.CHANGING, *entry_points.DECLARED)
    assert {line.split()[0] for line in lines} - {"check"} == (
        {path.stem for path in command_files()} - entry_points.OTHER_COMMANDS
    )


@pytest.mark.usefixtures("empty_log")
def test_a_ledger_that_is_away_is_named_and_the_others_are_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"default", "other"} <= set(ledger_aliases())
    _handle_long_ago()
    connections["other"].close()
    with monkeypatch.context() as patch:
        patch.setitem(connections["other"].settings_dict, "PORT", "9")
        with pytest.raises(
            LedgerUnavailable, match=r"(?s)not be pruned \('other': .*1 rows of the other databases.*next pass"
        ):
            prune_inboxes(older_than=datetime.now(UTC))
        _handle_long_ago()
        broker_sql("INSERT INTO outbox.pruned_table VALUES ('shop', 'gone', 'ledger', 0, now())")
        with pytest.raises(LedgerUnavailable, match=r"(?s)not be pruned \('other': .*next pass"):
            run_prune()
    assert not InboxEntry.objects.exists()
    assert broker_sql("SELECT name FROM outbox.pruned_table WHERE alias = 'gone'") == []


def _handle_long_ago() -> None:
    InboxEntry.objects.create(group="g", generation=1, message_id=uuid7(), handled_at=datetime(2020, 1, 1, tzinfo=UTC))


@pytest.mark.usefixtures("empty_log")
def test_an_alias_without_settings_has_no_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    unset = connections.configure_settings({"default": {}})["default"]
    monkeypatch.setattr(connections, "settings", {"unset": unset, **connections.settings})
    with transaction.atomic(), end_messages_lost():
        publish("orders", {}, key="kept")
    run_check_back()
    assert decisions() == {"kept": "C"}
    run_prune()
    assert [one.name for one in examine() if "unset" in one.name] == []
