"""OUTBOX, the system checks, the router and what `migrate` installs."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.apps import apps
from django.conf import settings
from django.core.checks import CheckMessage, run_checks
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connections
from django.test.utils import override_settings

from outbox import Delivery
from outbox.broker.operations.conditions import Severity
from outbox.broker.schema import install
from outbox.codec import BytesCodec
from outbox.contrib.django import publish, subscriber
from outbox.contrib.django.database.aliases import alias_conninfo, broker_database
from outbox.contrib.django.engine.broker import get_codecs, reset_broker
from outbox.contrib.django.ledger.ledger_checker import ledger_aliases
from outbox.contrib.django.operations.checks import check_databases
from outbox.contrib.django.operations.doctor import examine
from outbox.contrib.django.operations.sessions import demands
from outbox.contrib.django.operations.watching import refuse_unknown_thresholds
from outbox.contrib.django.routers import BrokerRouter
from outbox.contrib.django.settings.conf import get_settings, parse_settings
from outbox.contrib.django.subscribers import registry
from outbox.contrib.django.subscribers.registry import autodiscover, unregister_all
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.errors import ConfigurationError
from outbox.utils.safe_text import masked_names
from tests.django.configured import OUTBOX
from tests.django.conftest import point_alias
from tests.django.state import execute
from tests.django.support import consume, sequence


def test_every_setting_has_a_default() -> None:
    settings = parse_settings({})
    assert (settings.broker, settings.in_memory) == ("default", False)
    with pytest.raises(ConfigurationError, match="PRODUCER_GROUP"):
        settings.required_producer_group()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ([], "must be a dictionary"),
        ({"PRODUCER_GROUPS": "x"}, r"'PRODUCER_GROUPS'.*Did you mean 'PRODUCER_GROUP'"),
        ({"broker": "x"}, "Did you mean 'BROKER'"),
        ({"SCHEMA": "a b"}, r"OUTBOX\['SCHEMA'\].*'a b'"),
        ({"LISTEN_URL": "not a url"}, r"OUTBOX\['LISTEN_URL'\] cannot be read"),
        ({"QUUX": 1}, "The settings are BROKER"),
        ({"BROKER": 3}, r"OUTBOX\['BROKER'\] must be a text.*3 \(int\)"),
        ({"PRODUCER_GROUP": "a b"}, r"OUTBOX\['PRODUCER_GROUP'\]: group name 'a b'"),
        ({"IN_MEMORY": "yes"}, "True or False"),
        ({"IMMUNITY_SECONDS": 1.5}, "whole number of seconds, at least 0"),
        ({"SEND_TIMEOUT_SECONDS": 0}, "number of seconds, at least 0.05"),
        ({"LEASE_SECONDS": "10"}, "number of seconds, at least 1"),
        ({"LEASE_SECONDS": 2_073_601}, r"\['LEASE_SECONDS'\] must be .* at most 2,073,600; it is 2073601"),
        ({"IMMUNITY_SECONDS": 2**31}, "at most 2,147,483,647"),
        ({"THRESHOLDS": {"LAG_SECONDS": (float("nan"), None)}}, "numbers, at least 0"),
        ({"TOPICS": {"orders": {"retention_seconds": 2**31}}}, r"\['retention_seconds'\] .*at most 2,147,483,647"),
        ({"TOPICS": {"orders": {"backlog_limit": 2**63}}}, "at most 9,223,372,036,854,775,807"),
        ({"THRESHOLDS": 60}, r"OUTBOX\['THRESHOLDS'\] must be a dictionary"),
        ({"THRESHOLDS": {"LAG_SECONDS": 60}}, r"\['LAG_SECONDS'\] must be a pair"),
        ({"HEALTH_ADDRESS": "9464"}, "HOST:PORT"),
        ({"HEALTH_ADDRESS": "[]:9464"}, "HOST:PORT"),
        ({"MASKED_FIELDS": {4: ["iban"]}}, r"\['MASKED_FIELDS'\]\[4\] must be a text"),
        ({"MASKED_FIELDS": {"orders": 4}}, r"\['MASKED_FIELDS'\]\['orders'\] must be a list of field names"),
        ({"HANDLER_MIDDLEWARE": "a.path"}, "must be a list of dotted paths"),
        ({"TOPICS": ["orders"]}, r"OUTBOX\['TOPICS'\] must be a dictionary"),
        ({"TOPICS": {"orders": 4}}, r"OUTBOX\['TOPICS'\]\['orders'\] must be a dictionary"),
        ({"TOPICS": {"orders": {"queue": 4}}}, "Did you mean 'queue_count'"),
        ({"TOPICS": {"orders": {"types": "FIFO"}}}, "a list of 'NORMAL'"),
        ({"TOPICS": {"orders": {"queue_count": 5000}}}, r"\['orders'\].*1 to 1024"),
        ({"TOPICS": {"or ders": {}}}, "topic name 'or ders'"),
        ({"TOPICS": {"orders": {"on_park": "explode"}}}, "'hold' or 'release'"),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(settings: Any, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        parse_settings(settings)


class Texts(str, Enum):  # noqa: UP042
    ORDERS = "orders"
    IBAN = "IBAN"
    HOLD = "hold"
    ADDRESS = "localhost:9464"


def test_a_member_of_an_enumeration_is_read_as_its_text() -> None:
    found = parse_settings(
        {
            "BROKER": Texts.ORDERS,
            "HEALTH_ADDRESS": Texts.ADDRESS,
            "MASKED_FIELDS": {Texts.ORDERS: [Texts.IBAN]},
            "TOPICS": {Texts.ORDERS: {"on_park": Texts.HOLD}},
        }
    )
    assert f"{found.broker} {found.health_address}" == "orders localhost:9464"
    assert masked_names(found.masked_fields, "orders") == {"iban"}
    assert found.topics["orders"].topic.on_park == "hold"


def test_a_threshold_that_no_condition_has_is_named_with_the_nearest() -> None:
    refuse_unknown_thresholds(
        parse_settings({"THRESHOLDS": {"LAG_SECONDS": (60, 600), "LOCK_SECONDS": (1, None)}}).thresholds
    )
    wrong = r"\['LAG_SECOND'\] is not a threshold. Did you mean 'LAG_SECONDS'"
    with pytest.raises(ConfigurationError, match=wrong):
        refuse_unknown_thresholds(parse_settings({"THRESHOLDS": {"LAG_SECOND": (60, 600)}}).thresholds)


def test_one_codec_for_the_whole_project(application: None, outbox_settings: Callable[..., None]) -> None:
    outbox_settings(CODEC="outbox.codec.BytesCodec", TOPICS={"orders": {}, "json": {"codec": "outbox.codec.JsonCodec"}})
    assert get_codecs().encode("orders", b"raw") == (b"raw", BytesCodec.content_type)
    assert get_codecs().encode("json", {}) == (b"{}", "application/json")
    assert get_codecs().decode("application/json", b"{}") == {}
    for named, complaint in (
        ("outbox.codec.Nothing", "cannot be imported"),
        ("outbox.codec.Codecs", "no content_type"),
    ):
        outbox_settings(CODEC=named)
        with pytest.raises(ConfigurationError, match=rf"OUTBOX\['CODEC'\] = '{named}'.*{complaint}"):
            get_codecs()
    outbox_settings(CODEC="outbox.codec.JsonCodec", TOPICS={"orders": {"codec": "outbox.codec.Nothing"}})
    with pytest.raises(ConfigurationError, match=r"\['orders'\]\['codec'\] = 'outbox.codec.Nothing'"):
        get_codecs()


@pytest.mark.usefixtures("no_subscribers")
def test_subscribers_are_found_in_one_module_of_each_app(
    application: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`handlers.py` is a name that other apps have for other things, some of which must not be imported twice."""
    module = apps.get_app_config("shop").module
    assert module is not None
    monkeypatch.setattr(module, "__path__", [*module.__path__, str(tmp_path)])
    (tmp_path / "handlers.py").write_text("raise RuntimeError('not mine to import')\n")
    assert autodiscover() == []
    (tmp_path / "subscribers.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(ConfigurationError, match=r"tests\.django\.shop\.subscribers.*not_installed_anywhere"):
        autodiscover()
    (tmp_path / "subscribers.py").write_text(
        "from outbox.contrib.django import subscriber\n@subscriber('orders', group='found')\ndef found(delivery): ...\n"
    )
    importlib.invalidate_caches()
    try:
        assert [item.name for item in autodiscover()] == ["tests.django.shop.subscribers:found"]
    finally:
        sys.modules.pop("tests.django.shop.subscribers", None)


def test_conninfo_of_an_alias(application: None) -> None:
    with psycopg.connect(alias_conninfo("broker")) as connection:
        assert connection.info.dbname == connections["broker"].settings_dict["NAME"]
    with pytest.raises(ConfigurationError, match="'lite' is a SQLite database"):
        alias_conninfo("lite")
    with pytest.raises(ConfigurationError, match="'nowhere' is not in DATABASES"):
        alias_conninfo("nowhere")


# -- system checks --------------------------------------------------------------------------------------


def found(*, databases: list[str] | None = None) -> set[str]:
    return {str(item.id) for item in run_checks(databases=databases) if str(item.id).startswith("outbox.")}


def test_a_sound_project_has_nothing_to_complain_about(application: None) -> None:
    assert found(databases=["default", "broker", "other", "lite"]) == set()


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"OUTBOX": {"BORKER": "x"}}, {"outbox.E001"}),
        ({"OUTBOX": {**OUTBOX, "THRESHOLDS": {"LAG_SECOND": (60, 600)}}}, {"outbox.E001"}),
        ({"OUTBOX": {**OUTBOX, "BROKER": "nowhere"}}, {"outbox.E002"}),
        ({"OUTBOX": {**OUTBOX, "BROKER": "lite"}}, {"outbox.E002"}),
        ({"OUTBOX": {"BROKER": "broker"}}, {"outbox.E004"}),
        ({"OUTBOX": {**OUTBOX, "TOPICS": {"orders": {"codec": "no.where"}}}}, {"outbox.E005"}),
        ({"DATABASE_ROUTERS": []}, {"outbox.W008"}),
    ],
)
def test_each_mistake_is_found(application: None, changed: dict[str, Any], expected: set[str]) -> None:
    with override_settings(**changed):
        assert expected <= found()


def test_autocommit_and_isolation_of_aliases(application: None) -> None:
    entry = connections["lite"].settings_dict
    entry["AUTOCOMMIT"], entry["OPTIONS"]["isolation_level"] = False, "read uncommitted"
    try:
        assert found() == {"outbox.E006", "outbox.E007"}
    finally:
        entry["AUTOCOMMIT"] = True
        del entry["OPTIONS"]["isolation_level"]


def test_contradicting_subscribers(application: None, no_subscribers: None) -> None:
    def handler(given: Delivery) -> None: ...

    subscriber("orders", group="g", broadcast=True)(handler)
    subscriber("undeclared", group="g", using="nowhere")(handler)
    assert found() == {"outbox.E014", "outbox.E010", "outbox.W013"}


def test_a_concurrent_subscriber_of_a_fifo_topic_is_warned(application: None, no_subscribers: None) -> None:
    subscriber("steps", group="g")(lambda delivery: None)
    assert found() == {"outbox.W015"}
    unregister_all()
    subscriber("steps", group="g", mode="key_ordered")(lambda delivery: None)
    assert found() == set()


def test_databases_are_looked_into(databases: None, new_database: Callable[..., str]) -> None:
    empty = new_database()
    # A database that was migrated before outbox came: one that never was gets its tables with the rest.
    with psycopg.connect(empty) as connection:
        connection.execute("CREATE TABLE django_migrations ()")
    before = dict(connections["other"].settings_dict)
    point_alias("other", empty)
    try:
        assert found(databases=["other"]) == {"outbox.W021"}
    finally:
        connections["other"].close()
        for settings in (connections["other"].settings_dict, connections.settings["other"]):
            settings.update(before)
    with override_settings(OUTBOX={**OUTBOX, "TOPICS": {**OUTBOX["TOPICS"], "fresh": {}}}):
        assert found(databases=["broker"]) == {"outbox.W027"}
    point_alias("broker", empty)
    reset_broker()
    assert found(databases=["broker"]) == {"outbox.W026"}


def test_a_server_of_the_broker_that_is_too_old_is_an_error(application: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "MINIMUM_POSTGRESQL", 99)
    reset_broker()
    assert found(databases=["broker"]) == {"outbox.E025"}
    with pytest.raises(CommandError, match="PostgreSQL 99 or newer"):
        call_command("outbox_topic", "list")


def test_servers_that_may_forget_are_named(application: None) -> None:
    execute("SET synchronous_commit = off")
    assert found(databases=["default"]) == {"outbox.W022"}


# -- migrate --------------------------------------------------------------------------------------------


def test_migrate_of_a_dedicated_broker_database_installs_the_broker_and_nothing_else(
    databases: None, new_database: Callable[..., str]
) -> None:
    point_alias("broker", new_database())
    for _ in range(2):
        call_command("migrate", database="broker", verbosity=0)
    with broker_database().connect() as connection:
        tables = connection.execute("SELECT schemaname, tablename FROM pg_tables").fetchall()
        topics = connection.execute("SELECT name FROM outbox.topic ORDER BY 1").fetchall()
    assert {name for schema, name in tables if schema == "public"} == {"django_migrations"}
    assert ("outbox", "commit_log") in tables
    assert [name for (name,) in topics] == sorted(OUTBOX["TOPICS"])


def test_a_changed_declaration_is_updated_by_migrate(databases: None, outbox_settings: Callable[..., None]) -> None:
    outbox_settings(TOPICS={"orders": {"queue_count": 6}})
    call_command("migrate", database="broker", verbosity=0)
    with broker_database().connect() as connection:
        assert connection.execute("SELECT queue_count FROM outbox.topic WHERE name = 'orders'").fetchone() == (6,)


def test_the_router_has_an_opinion_about_the_brokers_database_only() -> None:
    router = BrokerRouter()
    assert router.allow_migrate("broker", "shop") is False
    assert router.allow_migrate("default", "shop") is None
    with override_settings(OUTBOX={"BROKER": "default"}):
        assert router.allow_migrate("default", "shop") is None
    with override_settings(OUTBOX={"BORKER": "broker"}):
        assert router.allow_migrate("broker", "shop") is None, "the check names the fault"


def test_migrations_are_in_step_with_the_models(application: None) -> None:
    call_command("makemigrations", "outbox", check=True, dry_run=True, verbosity=0)


def test_importing_needs_neither_settings_nor_apps() -> None:
    subprocess.run(
        [sys.executable, "-c", "from outbox.contrib.django import publish, subscriber, transactional_message"],
        check=True,
    )


def test_an_app_registry_that_is_filled_again_registers_each_check_once(application: None) -> None:
    """Tests with override_settings(INSTALLED_APPS=...) fill it again."""
    with override_settings(OUTBOX={**OUTBOX, "BROKER": "nowhere"}):
        before = [item.id for item in run_checks()]
    with override_settings(INSTALLED_APPS=[*settings.INSTALLED_APPS]):
        pass
    with override_settings(OUTBOX={**OUTBOX, "BROKER": "nowhere"}):
        assert [item.id for item in run_checks()] == before


# -- groups that are new to a topic -----------------------------------------------------------------


def subscribe(group: str, **options: Any) -> None:
    @subscriber("orders", group=group, **options)
    def ship(delivery: Delivery) -> None: ...


def warned() -> list[CheckMessage]:
    return [one for one in check_databases(databases=["broker"]) if one.id == "outbox.W032"]


@pytest.fixture
def _history(databases: None, no_subscribers: None) -> None:
    """Three messages that the group shipping has handled."""
    subscribe("shipping")
    for number in range(3):
        publish("orders", {}, key=str(number), at_once=True)
    consume()
    registry.unregister_all()


@pytest.mark.usefixtures("databases", "no_subscribers")
def test_the_first_group_of_a_topic_is_not_warned_about() -> None:
    subscribe("shipping")
    publish("orders", {}, at_once=True)
    sequence()
    assert warned() == []


@pytest.mark.usefixtures("databases", "no_subscribers")
@pytest.mark.usefixtures("_history")
def test_another_name_is_warned_about_by_the_check_and_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    subscribe("dispatch")
    [found] = warned()
    assert (
        "'dispatch' is new to the topic 'orders'. The group will handle all messages of the topic, about 3, "
        in found.msg
    )
    assert "'shipping'" in found.msg
    assert found.hint is not None
    assert "start='earliest'" in found.hint
    assert "is 'shipping' under another name, give it the former name" in found.hint
    with caplog.at_level(logging.WARNING):
        runtime = consumer_runtime()
    assert "is 'shipping' under another name" in caplog.text
    runtime.run_once()
    assert warned() == [], "it is not new any more"


@pytest.mark.usefixtures("databases", "no_subscribers")
@pytest.mark.usefixtures("_history")
@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_a_group_with_a_declared_start_is_not_warned_about(start: str, caplog: pytest.LogCaptureFixture) -> None:
    subscribe("dispatch", start=start)
    assert warned() == []
    with caplog.at_level(logging.WARNING):
        consumer_runtime()
    assert caplog.text == ""


@pytest.mark.usefixtures("databases", "no_subscribers")
@pytest.mark.usefixtures("_history")
def test_a_new_group_is_not_taken_for_one_that_still_exists() -> None:
    subscribe("shipping")
    subscribe("points")
    [found] = warned()
    assert "'points'" in found.msg
    assert found.hint is not None
    assert "another name" not in found.hint


# -- sessions ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("databases", "no_subscribers")
def test_the_sum_is_compared_with_the_limit(outbox_settings: Callable[..., None]) -> None:
    for number in range(14):
        subscriber("orders", group=f"group{number}")(lambda given: None)
    [demand] = [one for one in demands(get_settings()) if "broker" in one.aliases]
    # Eight handlers, 2 sessions of the consumer process, 9 to publish, 4 of the worker, and one pass for each ledger.
    assert demand.of_worker == 8 + 2 + 9 + 4 + len(set(ledger_aliases()) & set(demand.aliases))
    [(allowed,)] = [[int(row[0])] for row in _rows("SHOW max_connections")]
    assert demand.limit is not None
    assert (demand.workers, demand.limit.allowed) == (1, allowed)
    assert 0 < demand.open_elsewhere < allowed

    def warnings(alias: str) -> list[str]:
        return [str(one.msg) for one in check_databases(databases=[alias]) if one.id == "outbox.W042"]

    assert warnings("default") == []
    outbox_settings(HANDLER_THREADS=4)
    [fewer] = [one for one in demands(get_settings()) if "broker" in one.aliases]
    # As many handlers less, and as many of their sessions to publish.
    assert fewer.of_worker == demand.of_worker - 4 - 4
    outbox_settings(HANDLER_THREADS=8, CONSUMER_PROCESSES=allowed // 8)
    [text] = warnings("default")
    assert "1 worker(s) of this project may open" in text and f"allows {allowed}" in text
    assert len(warnings("broker")) == 1
    assert [one.severity for one in examine() if one.name == "check outbox.W042"] == [Severity.WARNING]
    outbox_settings(CONSUMER_PROCESSES=1)
    [fine] = [one for one in examine() if one.name == "sessions of workers"]
    assert f"1 worker(s) of this project may open {demand.of_worker} sessions each" in fine.meaning


def _rows(statement: str) -> list[tuple[str]]:
    with connections["default"].cursor() as cursor:
        cursor.execute(statement)
        found: list[tuple[str]] = cursor.fetchall()
        return found
