"""outbox_install, its --drop, and connections that take a role."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from django.apps import apps
from django.core.checks import run_checks
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connections, transaction
from django.test.utils import override_settings
from psycopg.conninfo import make_conninfo

from outbox.broker.schema.install import SCHEMA_VERSION
from outbox.contrib.django import message, publish, publish_messages, run_check_back, subscriber
from outbox.contrib.django.database.aliases import alias_conninfo, broker_database
from outbox.contrib.django.databases import database_from_url
from outbox.contrib.django.engine.broker import engine_of, flush, reset_broker
from outbox.contrib.django.operations import installation
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.worker.drain import drain
from outbox.retry import RetryPolicy
from outbox.utils.ids import uuid7
from tests.broker.schema import versions
from tests.django import configured, support
from tests.django.conftest import BROKER_TEMPLATE, point_alias
from tests.django.shop.models import Effect, Order
from tests.django.state import decisions
from tests.django.support import broker_sql, sequence
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers")


def call(*arguments: str) -> str:
    return support.call("outbox_install", *arguments)


def tables(alias: str = "broker") -> set[str]:
    with psycopg.connect(alias_conninfo(alias), autocommit=True) as connection:
        rows = connection.execute("SELECT schemaname, tablename FROM pg_tables").fetchall()
    return {f"{schema}.{name}" for schema, name in rows if schema not in ("pg_catalog", "information_schema")}


def test_it_installs_upgrades_and_reports_it(
    new_database: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_alias("broker", new_database())
    said = call("--dry-run")
    assert f"would be brought from version 0 to {SCHEMA_VERSION}" in said
    assert "orders" in said
    assert tables() == set()
    assert f"brought from version 0 to {SCHEMA_VERSION}" in call()
    assert "outbox.commit_log" in tables()
    assert f"is at version {SCHEMA_VERSION}" in call()
    versions.become_next(tmp_path / "schema", monkeypatch)
    monkeypatch.setattr(installation, "SCHEMA_VERSION", versions.NEXT)
    assert f"would be brought from version {SCHEMA_VERSION} to {versions.NEXT}" in call("--dry-run")
    assert f"brought from version {SCHEMA_VERSION} to {versions.NEXT}" in call()
    assert "outbox.extra" in tables()


def test_sessions_in_the_way_are_named_and_patience_is_given(caplog: pytest.LogCaptureFixture) -> None:
    url = alias_conninfo("broker")
    with psycopg.connect(url, application_name="report") as holder, psycopg.connect(url, autocommit=True) as watching:
        holder.execute("SELECT count(*) FROM outbox.topic")
        age = "SELECT clock_timestamp() - xact_start > interval '1 second' FROM pg_stat_activity WHERE pid = %s"
        pid = holder.info.backend_pid
        eventually(lambda: watching.execute(age, [pid]).fetchone() == (True,))
        with pytest.raises(
            CommandError,
            match=rf"not dropped: at each attempt within \d+ s.*session {pid} \(report\): idle in transaction",
        ):
            call("--drop", "--force", "--patience", "0.1")
        assert f"block the change of the broker's tables in schema 'outbox': session {pid} (report)" in caplog.text
        assert watching.execute("SELECT to_regclass('outbox.commit_log') IS NOT NULL").fetchone() == (True,)
    for wrong in ("-1", "inf", "soon"):
        with pytest.raises(CommandError, match="--patience"):
            call("--patience", wrong)


def test_what_is_undelivered_is_named_and_kept() -> None:
    @subscriber("orders", group="effects")
    def effect(given: object) -> None:
        Effect.objects.create(number="x")

    drain()
    publish("orders", {}, key="one", at_once=True)
    with transaction.atomic():
        publish("payments", {}, key="two")
        with pytest.raises(CommandError, match=r"'payments' has 1 messages undecided.*Nothing was dropped.*--force"):
            call("--drop")
    with pytest.raises(CommandError, match="'orders' has 1 messages not queued yet"):
        call("--drop", "--dry-run")
    assert decisions() == {"one": "C", "two": "C"}
    said = call("--drop", "--force", "--dry-run")
    assert "Nothing was changed" in said
    assert "before: lost: topic 'orders' has 1 messages not queued yet" in said
    drain()
    assert Effect.objects.count() == 1
    assert "Done." in call("--drop")
    assert not any(name.startswith("outbox.") for name in tables())


def test_what_is_not_the_brokers_is_kept() -> None:
    with broker_database().connect() as connection:
        connection.execute("CREATE TABLE outbox.mine (id integer)")
    with pytest.raises(CommandError, match=r"objects that are not part of the broker \(mine\).*Nothing was dropped"):
        call("--drop", "--force")
    assert "outbox.commit_log" in tables()


@pytest.mark.slow
def test_dropped_and_migrated_to_zero_nothing_is_left(
    new_database: Callable[..., str], outbox_settings: Callable[..., None]
) -> None:
    """The steps of docs/operations/upgrade.md, with the broker in the application's database."""
    before = alias_conninfo("other")
    point_alias("other", new_database())
    outbox_settings(BROKER="other")
    try:
        with override_settings(DATABASE_ROUTERS=[]):
            call_command("migrate", database="other", verbosity=0, run_syncdb=True)
            assert {"outbox.commit_log", "public.outbox_ledger"} <= tables("other")
            for app in apps.get_app_configs():
                if app.label.startswith("outbox_") and Path(app.path, "migrations").exists():
                    call_command("migrate", app.label, "zero", database="other", verbosity=0)
            call("--drop")
            call_command("migrate", "outbox", "zero", database="other", verbosity=0)
            assert [name for name in tables("other") if "outbox" in name] == []
    finally:
        point_alias("other", before)


def test_a_part_of_another_service_is_dropped_by_its_name() -> None:
    with broker_database().connect() as connection:
        connection.execute("CREATE TABLE outbox.greeting (text text)")
        connection.execute("INSERT INTO outbox.greeting VALUES ('hello')")
        connection.execute("INSERT INTO outbox.schema_version (name, version, leads, objects)"
                           " VALUES ('greetings', 1, false, '{greeting}')")  # fmt: skip
    with pytest.raises(CommandError, match=r"no part 'farewells' has tables .* Nothing was dropped"):
        call("--drop", "--part", "farewells")
    with pytest.raises(CommandError, match=r"'greetings' has rows on 'broker': 1 in greeting\. Nothing was dropped"):
        call("--drop", "--part", "greetings")
    with pytest.raises(CommandError, match="--force needs --drop"):
        call("--force")
    with pytest.raises(CommandError, match="--part needs --drop"):
        call("--part", "greetings")
    assert "Nothing was changed" in call("--drop", "--part", "greetings", "--force", "--dry-run")
    assert "outbox.greeting" in tables()
    assert "Done." in call("--drop", "--part", "greetings", "--force")
    assert "outbox.greeting" not in tables() and "outbox.commit_log" in tables()
    with broker_database().connect() as connection:
        found = connection.execute("SELECT count(*) FROM outbox.schema_version WHERE name = 'greetings'").fetchone()
    assert found == (0,)


def test_a_broker_that_is_left_with_messages_is_named(outbox_settings: Callable[..., None]) -> None:
    @subscriber("orders", group="effects")
    def effect(given: object) -> None:
        Effect.objects.create(number="x")

    outbox_settings(BROKER="other")
    call()
    drain()
    with transaction.atomic():
        publish("orders", {}, key="one", using="default")
    for drained, expected in ((False, ["outbox.W028"]), (True, [])):
        outbox_settings(BROKER="other")
        if drained:
            drain()
        outbox_settings(BROKER="broker")
        found = [item for item in run_checks(databases=["other"]) if item.id == "outbox.W028"]
        assert [item.id for item in found] == expected
        for item in found:
            assert "a broker on 'other' has messages of this project: topic 'orders' has 1 messages" in item.msg
            assert "with BROKER set back to 'other'" in str(item.hint)
    outbox_settings(BROKER="other")
    call("--drop", "--force")


def test_remaining_work_is_counted_by_whether_workers_settle_it() -> None:
    """A worker that ends when nothing waits must not wait for an operator."""

    @subscriber("orders", group="effects", retry=RetryPolicy(max_attempts=1))
    def effect(given: object) -> None:
        raise ValueError("always")

    with transaction.atomic():
        publish("orders", {}, key="one", using="default")
    flush(within_seconds=5)
    before = engine_of(get_settings()).leftover_work()
    assert (before.waiting, before.staying) == (["topic 'orders' has 1 messages not queued yet"], [])
    drain()
    after = engine_of(get_settings()).leftover_work()
    assert (after.waiting, after.staying) == ([], ["group 'effects' has 1 messages dead"])


def test_a_ledger_whose_broker_is_another_one_now_is_named(
    outbox_settings: Callable[..., None], new_database: Callable[..., str]
) -> None:
    """Also where no alias leads to the old one any more."""

    def found() -> list[str]:
        return [str(item.id) for item in run_checks(databases=["default"]) if item.id == "outbox.W029"]

    earlier = UUID(int=uuid7().int - (120_000 << 80))
    with transaction.atomic():
        publish_messages([replace(message("orders", {}, key="one"), message_id=earlier)])
    with transaction.atomic():
        publish("orders", {}, key="two")
    assert found() == []
    point_alias("broker", new_database(template=BROKER_TEMPLATE))
    assert found() == ["outbox.W029"]


@pytest.fixture
def role(server_url: str, new_database: Callable[..., str]) -> Iterator[str]:
    """The broker's alias logs in as a role without any right, and assumes one that owns the database."""
    url = new_database()
    with psycopg.connect(url, autocommit=True) as connection:
        name = connection.info.dbname
        connection.execute('CREATE ROLE "the owner"')
        connection.execute("CREATE ROLE outbox_service LOGIN NOINHERIT")
        connection.execute('GRANT "the owner" TO outbox_service')
        connection.execute(f'ALTER DATABASE "{name}" OWNER TO "the owner"')
    point_alias("broker", url)
    entry = database_from_url(url)
    for settings in (connections["broker"].settings_dict, connections.settings["broker"]):
        settings.update(
            {**entry, "USER": "outbox_service", "OPTIONS": {**entry["OPTIONS"], "assume_role": "the owner"}}
        )
    yield "the owner"
    reset_broker()
    point_alias("broker", url)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute('REASSIGN OWNED BY "the owner" TO CURRENT_USER')
        connection.execute('DROP OWNED BY "the owner", outbox_service')
        connection.execute('DROP ROLE outbox_service, "the owner"')


def test_the_brokers_own_connections_assume_the_role_of_the_alias(
    role: str, outbox_settings: Callable[..., None]
) -> None:
    @subscriber("orders", group="effects")
    def effect(given: object) -> None:
        Effect.objects.create(number="x")

    call()
    with transaction.atomic():
        Order.objects.create(number="one")
        publish("orders", {}, key="one")
    run_check_back()
    assert drain().handled == 1
    outbox_settings(LISTEN_URL=make_conninfo(broker_database().conninfo, options=""))
    for direct in (False, True):
        with broker_database().connect(direct=direct) as connection:
            assert connection.execute("SELECT session_user, current_user").fetchone() == ("outbox_service", role)
    with psycopg.connect(alias_conninfo("broker")) as connection:
        owners = connection.execute("SELECT DISTINCT tableowner FROM pg_tables WHERE schemaname = 'outbox'").fetchall()
    assert owners == [(role,)]


# -- searchable topics ------------------------------------------------------------------------------


def said(*arguments: str) -> str:
    out = StringIO()
    with suppress(SystemExit):
        call_command(*arguments, stdout=out, stderr=out, no_color=True)
    return out.getvalue()


INDEXES = """
SELECT name::text FROM pg_indexes JOIN outbox.topic ON indexname = 'commit_log_key_of_' || topic_id
WHERE schemaname = 'outbox'
"""


def test_install_builds_the_index_and_drops_it(databases: None, outbox_settings: Callable[..., None]) -> None:
    topics: dict[str, Any] = configured.OUTBOX["TOPICS"]
    outbox_settings(TOPICS={**topics, "orders": {**topics["orders"], "searchable": True}})
    assert "building the index of the keys of topic 'orders'" in said("outbox_install")
    assert broker_sql(INDEXES) == [("orders",)]
    assert "building" not in said("outbox_install")
    receipt = publish("orders", {}, key="4711", at_once=True)
    sequence()
    [found] = json.loads(said("outbox_message", "list", "orders", "--key", "4711", "--json"))
    assert found["message_id"] == str(receipt.message_id)
    broker_sql("DO $$ BEGIN EXECUTE (SELECT 'DROP INDEX outbox.' || indexname FROM pg_indexes"
         " WHERE indexname LIKE 'commit_log_key_of_%'); END $$")  # fmt: skip
    assert "searchable topics without an index: orders" in " ".join(said("outbox_doctor").split())
    outbox_settings(TOPICS=topics)
    said("outbox_install")
    assert broker_sql(INDEXES) == []
    assert "searchable topics" not in said("outbox_doctor")
