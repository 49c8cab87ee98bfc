"""An erasure leaves the data nowhere: each table of both databases, each file and each page is searched."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import re
import resource
import shlex
import signal
import threading
import unittest
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib import import_module
from inspect import getsource
from io import StringIO
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

import psycopg
import pytest
from django.apps import apps
from django.conf import settings
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connections, models, transaction
from django.test import TestCase
from django.utils import timezone
from psycopg import sql

from outbox import hooks
from outbox.broker.operations.progress import list_blocked
from outbox.contrib.django import ClaimedDelivery, publish, publish_many, subscriber
from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.django.engine.broker import get_codecs as codecs
from outbox.contrib.django.models import InboxEntry, OperatorAction, RaisedCondition, StepEntry
from outbox.contrib.django.worker.workers import wait_until_prepared
from outbox.contrib.encryption import Subject, envelope
from outbox.contrib.encryption.keys import create_key_table, subject_keys
from outbox.contrib.encryption.models import SubjectKey
from outbox.contrib.erasure import broker_rows, erasing, erasure_list
from outbox.contrib.erasure.broker_rows import Erasure
from outbox.contrib.erasure.erasing import repeat_erasures
from outbox.contrib.erasure.erasure_list import ErasureFile
from outbox.contrib.erasure.models import ErasureEntry
from outbox.contrib.reconciliation.models import Finding, SavedReconciliation
from outbox.contrib.rocketmq.models import DeadLetterNote, RelayEntry
from outbox.contrib.saga.models import SagaProgress
from outbox.contrib.tasks.models import TaskEntry
from outbox.contrib.unique import Unique
from outbox.contrib.unique.models import UniqueKey
from outbox.erased import ERASED
from outbox.errors import HandlerNotStarted, OutboxError, PermanentError, UndecodableBody, UsageError
from outbox.message import Delivery
from outbox.utils import heartbeat
from spark.cli import parser
from tests.django.broker_world import World, new_world
from tests.django.operators import ALL, bury, client_of, make_user
from tests.django.processes import process
from tests.django.shop.models import Effect, Order
from tests.django.state import execute, stored
from tests.django.support import call_json, consume, sequence
from tests.django.test_forward import place, webhook
from tests.restores import dump, reload_rows
from tests.sinks.receiver import Request, keeping, serving
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers")

MARK: Final = "anna.marker@example.org"
TOPIC: Final = "reminders"
FORWARD: Final = {
    "partner": {
        "topics": {TOPIC: "there"},
        "sink": "webhook",
        "options": {"url": "https://example.org", "secrets": ["whsec_c2VjcmV0c2VjcmV0c2VjcmV0"]},
    }
}


@pytest.fixture(autouse=True)
def clean(databases: None) -> Iterator[None]:
    yield
    for model in (
        *(DeadLetterNote, ErasureEntry, Finding, RaisedCondition, SagaProgress),
        *(RelayEntry, SavedReconciliation, StepEntry, TaskEntry),
    ):
        model._base_manager.using("default").all().delete()
    ErasureEntry._base_manager.using("other").all().delete()
    ErasureEntry._base_manager.using("lite").all().delete()


def tables_with(text: str, *aliases: str) -> list[str]:
    """The tables with a row that contains the text, also in a column of bytes. Each table is copied out whole."""
    found = []
    for alias in aliases:
        with psycopg.connect(alias_conninfo(alias), autocommit=True) as connection:
            names = connection.execute(
                "SELECT format('%I.%I', schemaname, tablename) FROM pg_tables"
                " WHERE schemaname NOT IN ('pg_catalog', 'information_schema') ORDER BY 1"
            ).fetchall()
            for (name,) in names:
                with connection.cursor().copy(f"COPY {name} TO STDOUT (FORMAT binary)".encode()) as copy:
                    if text.encode() in b"".join(bytes(part) for part in copy):
                        found.append(f"{alias}:{name}")
    return found


def pages_with(text: str, ids: list[UUID]) -> list[str]:
    client = client_of(make_user(*ALL))
    addresses = [f"/outbox/messages/{one}/" for one in ids]
    addresses += ["/outbox/", "/outbox/dead-letters/", "/outbox/audit/", "/outbox/findings/", "/outbox/errors/",
                  "/outbox/search/", "/outbox/waiting/", "/outbox/incidents/"]  # fmt: skip
    pages = {one: client.get(one) for one in addresses}
    assert {page.status_code for page in pages.values()} <= {200, 404}, {k: v.status_code for k, v in pages.items()}
    return [address for address, page in pages.items() if text in page.content.decode()]


def fill(world: World) -> list[UUID]:
    """Messages about a person in every state, and what processes and operators have stored about them."""
    world.subscribe("mail", TOPIC)
    headers = {"name": MARK, "traceparent": "00-1", "outbox-timeout": "3600"}
    with transaction.atomic():
        queued = publish(TOPIC, {"name": MARK}, Unique(MARK, within=3600), key=MARK, headers=headers)
        delayed = publish(TOPIC, {"name": MARK}, key=MARK, delay=3600)
        publish(TOPIC, {"name": "someone else"}, key="other", headers={"name": "someone else"})
    sequence()
    ids = [queued.message_id, delayed.message_id]
    bury(world, "mail", MARK, f"ValueError: {MARK}", topic=TOPIC)
    [(log_id, topic_id, group_id)] = world.sql(
        "SELECT log_id, topic_id, group_id FROM outbox.commit_log JOIN outbox.topic USING (topic_id),"
        " outbox.consumer_group WHERE message_id = %s", queued.message_id,
    )  # fmt: skip
    transaction_id = queued.transaction_id
    for statement, values in (
        ("INSERT INTO outbox.quarantined_message (group_id, log_id, call_size, hung, evidence)"
         " VALUES (%s, %s, 1, true, %s)",
         (group_id, log_id, MARK)),
        ("INSERT INTO outbox.check_history (transaction_id, answer, detail) VALUES (%s, 'UNKNOWN', %s)",
         (transaction_id, MARK)),
        ("INSERT INTO outbox.pending_check (transaction_id, log_id, producer_group, stored_at, immune_until, due_at,"
         " last_answer) VALUES (%s, %s, 'shop', now(), now(), now(), %s)", (transaction_id, log_id, MARK)),
        ("INSERT INTO outbox.incident (kind, subject, detail) VALUES ('alarm', %s, %s)", (str(transaction_id), MARK)),
        # The person's name is in no place that the pattern of the key would find.
        ("INSERT INTO outbox.incident (kind, subject, detail) SELECT 'outage', 'mail on ' || name, 'of Mrs Marker'"
         " FROM outbox.topic WHERE topic_id = %s", (topic_id,)),
        ("INSERT INTO outbox.outage (instance_id, group_id, topic_id, error) VALUES (%s, %s, %s, %s)",
         (uuid4(), group_id, topic_id, f"TimeoutError: {MARK}")),
        ("UPDATE outbox.queue_lease SET stopped = %s", (f"KeyError: {MARK}",)),
        ("INSERT INTO outbox.queue_lease (group_id, queue_id, epoch, expires_at, stopped) SELECT %s, queue_id, 1,"
         " now(), %s FROM outbox.queue WHERE topic_id = %s ON CONFLICT (group_id, queue_id) DO UPDATE"
         " SET stopped = excluded.stopped", (group_id, f"KeyError: {MARK}", topic_id)),
        ("INSERT INTO outbox.held (log_id, topic_id, key) VALUES (%s, %s, %s)", (log_id, topic_id, MARK)),
        ("INSERT INTO outbox.incident (kind, subject, detail) VALUES ('process_failing', %s, %s)",
         ("consuming in process 1 on host", f"since 2026-01-01: {MARK}")),
        ("INSERT INTO outbox.unknown_version (instance_id, group_id, topic_id, event, version, error)"
         " VALUES (%s, %s, %s, 'moved', 2, %s)", (uuid4(), group_id, topic_id, MARK)),
        ("INSERT INTO outbox.schedule (producer_group, name, expression, timezone, missed, topic, content_type, body,"
         " declared_at, next_at, error) VALUES ('shop', 'report', '0 * * * *', 'UTC', 'skip', 'orders', 'text', '',"
         " now(), now() + interval '1 hour', %s)", (MARK,)),
        ("INSERT INTO outbox.slot (group_id, topic_id, key, number, instance_id, expires_at)"
         " VALUES (%s, %s, %s, 1, %s, now())", (group_id, topic_id, MARK, uuid4())),
        ("INSERT INTO outbox.slot_demand (group_id, topic_id, instance_id, wanted, in_use, waiting, waiting_for, keys,"
         " expires_at) VALUES (%s, %s, %s, 1, 0, 1, 'per_key', ARRAY[%s], now())", (group_id, topic_id, uuid4(), MARK)),
        ("INSERT INTO outbox.failure (group_id, log_id, attempt, error) VALUES (%s, %s, 0, %s)",
         (group_id, log_id, f"ValueError: {MARK}")),
        ("UPDATE outbox.subscription SET mode = 'orderly'", ()),
    ):  # fmt: skip
        world.sql(statement, *values)
    [blocked] = list_blocked(world.run, ["mail"], [TOPIC], limit=20)
    assert (blocked.blocked_key, blocked.blocked_error) == (MARK, f"ValueError: {MARK}"), "the control: it is blocked"
    now, one = timezone.now(), {"group": "mail", "generation": 1, "message_id": queued.message_id}
    StepEntry.objects.create(**one, name="charge", attempt=1, begun_at=now, result=json.dumps(MARK).encode())
    SagaProgress.objects.create(
        saga="trip", record="1", state="undone", step="book", reason=MARK, changed_at=now, message_id=queued.message_id
    )
    Finding.objects.create(
        output="out", run="1", rule="r", finding_class="MISMATCH", severity="error", key=MARK, detail=MARK, row=MARK,
        body=MARK, message_id=str(queued.message_id), step={"key": MARK},
    )  # fmt: skip
    RaisedCondition.objects.create(name="stopped", subject=MARK, severity=1, raised_at=now, seen_at=now)
    DeadLetterNote.objects.create(group="mail", message_id=queued.message_id, error=f"KeyError: {MARK}", noted_at=now)
    RelayEntry.objects.create(
        line=1, message_id=uuid4(), transaction_id=uuid4(), topic=TOPIC, key=MARK, headers={"name": MARK},
        content_type="application/json", body=MARK.encode(), size=len(MARK), born_at=now, error=f"refused {MARK}",
    )  # fmt: skip
    SavedReconciliation.objects.create(
        output="out",
        run="1",
        judged_at=now,
        plan={"first": MARK},
        causes=[{"subject": MARK, "severity": "error", "findings": 1, "new": 1, "oldest": ""}],
    )
    OperatorAction.objects.create(
        who="op", why=f"{MARK} has called", action="recall", subject=f"key {MARK} of topic {TOPIC}", effect=MARK,
        before={"selection": f"with key {MARK}"}, after={MARK: [MARK]}, outcome="done",
    )  # fmt: skip
    TaskEntry.objects.create(
        backend="default", queue_name="default", task_path="t", args=[MARK], kwargs={"a": MARK}, return_value=MARK,
        errors=[{"traceback": MARK}], enqueued_at=now, announced_at=now, message_id=queued.message_id,
    )  # fmt: skip
    return ids


def erase(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = call_json("outbox_erase", *arguments, "--no-input")
    return found


EVERYWHERE: Final = {
    *(f"broker:outbox.{name}" for name in (
        "commit_log", "held", "failure", "dead_letter", "quarantined_message", "check_history", "pending_check",
        "incident", "outage", "queue_lease", "unknown_version", "schedule", "slot", "slot_demand",
    )),
    *(f"default:public.outbox_{name}" for name in (
        "step", "unique", "saga", "finding", "raised_condition", "operator_action", "task",
        "dead_letter_note", "reconciliation", "relay",
    )),
}  # fmt: skip


def test_after_an_erasure_the_data_is_nowhere(outbox_settings: Callable[..., None], tmp_path: Path) -> None:
    listed = tmp_path / "erasures"
    outbox_settings(FORWARD=FORWARD, ERASURE_LIST=str(listed), ERASURE_SECRET="of the tests")
    with new_world(outbox_settings) as world:
        ids = fill(world)
        assert set(tables_with(MARK, "broker", "default")) == EVERYWHERE
        assert pages_with(MARK, ids), "the control: the pages show the data before"

        planned = erase(TOPIC, "--key", MARK, "--with-key", "--dry-run")
        assert set(tables_with(MARK, "broker", "default")) == EVERYWHERE, "a dry run changes nothing"
        assert not listed.exists() and not ErasureEntry.objects.exists()

        done = erase(TOPIC, "--key", MARK, "--with-key", "--reason", "request 17")
        assert tables_with(MARK, "broker", "default") == []
        assert pages_with(MARK, ids) == []
        assert MARK not in listed.read_text()
        assert done["after"]["rows"] == planned["before"]["rows"]
        assert set(done["after"]["rows"]) >= {"broker.commit_log", "broker.recalled", "default.outbox_task"}

        # What stays: ids, routing, times, the headers of outbox, the types of errors, and other people's messages.
        rows = world.sql("SELECT message_id, content_type, headers, body, starts_with(key, 'erased:')"
                         " FROM outbox.commit_log ORDER BY log_id")  # fmt: skip
        kept = {"traceparent": "00-1", "outbox-timeout": "3600"}
        erased = "application/vnd.outbox.erased"
        assert rows[:2] == [(ids[0], erased, kept, b"", True), (ids[1], erased, None, b"", True)]
        assert rows[2][2:] == ({"name": "someone else"}, b'{"name":"someone else"}', False)
        assert world.sql("SELECT error FROM outbox.dead_letter") == [("ValueError: (erased)",)]
        assert world.sql("SELECT detail FROM outbox.incident WHERE kind = 'outage'") == [("(erased)",)]
        assert world.sql("SELECT count(*) FROM outbox.scheduled") == [(0,)], "the waiting message is recalled"
        [blocked] = list_blocked(world.run, ["mail"], [TOPIC], limit=20)
        assert (str(blocked.blocked_key)[:7], blocked.blocked_error) == ("erased:", "ValueError: (erased)")
        assert world.sql("SELECT kind, reason FROM outbox.erased ORDER BY kind") == [
            ("key", "request 17"), ("message", "request 17"), ("message", "request 17"),
        ]  # fmt: skip
        assert bytes(StepEntry.objects.get(message_id=ids[0]).result or b"") == b"null"
        assert not UniqueKey.objects.exists()
        entry = OperatorAction.objects.get(action="erase")
        assert (entry.outcome, entry.why, entry.before["messages"]) == ("done", "request 17", 2)

        proof = erase(TOPIC, "--key", MARK, "--with-key", "--dry-run")
        assert (proof["before"]["rows"], proof["before"]["messages"]) == ({}, 2), "there is nothing left to erase"
        again = erase(TOPIC, "--key", MARK, "--with-key", "--reason", "request 17")
        assert again["after"]["rows"] == {}, "a second time there is nothing to erase"


def test_the_second_run_finds_the_messages_whose_key_the_first_one_replaced(
    outbox_settings: Callable[..., None],
) -> None:
    """A handler that had the body in memory stores its error after the first run."""
    outbox_settings(ERASURE_SECRET="of the tests")
    command = (TOPIC, "--key", MARK, "--with-key")
    with new_world(outbox_settings):

        @subscriber(TOPIC, group="mail", start="earliest")
        def mail(delivery: Delivery) -> None:
            erase(*command, "--reason", "request 17")
            raise PermanentError(f"{delivery.body['name']} has no street")

        published = publish(TOPIC, {"name": "Anna Marker"}, key=MARK, at_once=True).message_id
        consume()
        left = {"broker:outbox.dead_letter", "broker:outbox.failure"}
        assert set(tables_with("Anna Marker", "broker", "default")) == left, "the control"

        assert erase(*command, "--dry-run")["before"]["message_ids"] == [str(published)]
        erase(*command, "--reason", "request 17")
        assert tables_with("Anna Marker", "broker", "default") == []
        assert erase(*command, "--dry-run")["before"]["rows"] == {}


def test_the_row_of_a_task_is_erased_by_its_key_and_again_by_the_fingerprint(
    outbox_settings: Callable[..., None], tmp_path: Path
) -> None:
    """The list has no keys. Another service, or a restore, has a row whose message retention has removed."""
    outbox_settings(ERASURE_LIST=str(tmp_path / "erasures"), ERASURE_SECRET="of the tests")
    now = timezone.now()
    values: dict[str, Any] = {"backend": "default", "queue_name": "default", "task_path": "t", "args": [MARK]}
    with new_world(outbox_settings):
        task, other = (
            TaskEntry.objects.create(**values, enqueued_at=now, announced_at=now, kwargs={}, message_id=uuid4())
            for _ in range(2)
        )
        erase(TOPIC, "--key", str(task.pk), "--reason", "request 20")
        assert TaskEntry.objects.get(pk=task.pk).args == []
        for is_undone in (False, True):
            TaskEntry.objects.filter(pk=task.pk).update(args=[MARK])
            if is_undone:
                ErasureEntry._base_manager.all().delete()
            repeat_erasures()
            assert TaskEntry.objects.get(pk=task.pk).args == ([] if is_undone else [MARK])
        assert TaskEntry.objects.get(pk=other.pk).args == [MARK]


# A process that repeats the erasures, and is killed when it begins with the tables that have a key of their own.
KILLED: Final = """
import os, signal, django
django.setup()
from outbox.contrib.erasure import erasing
erasing.fingerprint = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
erasing.repeat_erasures()
"""


def test_a_kill_between_the_tables_leaves_no_key(outbox_settings: Callable[..., None], tmp_path: Path) -> None:
    """Otherwise the erasure would count as done, and the key would stay."""
    outbox = {"ERASURE_LIST": str(tmp_path / "erasures"), "ERASURE_SECRET": "of the tests"}
    outbox_settings(**outbox)
    with new_world(outbox_settings):
        erase(TOPIC, "--key", MARK, "--with-key", "--reason", "request 21")
        ErasureEntry._base_manager.all().delete()
        Finding.objects.create(output="out", run="1", rule="r", finding_class="LOST", severity="error", key=MARK)
        with process(["-c", KILLED], outbox=outbox, log=tmp_path / "log") as killed:
            assert killed.wait(timeout=60) == -signal.SIGKILL, (tmp_path / "log").read_text()
        assert tables_with(MARK, "default") == ["default:public.outbox_finding"], "the control"
        assert repeat_erasures() == {"default.outbox_finding": 1}
        assert tables_with(MARK, "default") == []


def test_each_table_of_the_application_is_erased_or_has_no_content() -> None:
    """A new table must be added to `_TABLES`, or here if it can never contain personal data."""
    names = ("ledger", "ledger_identity", "inbox", "claim", "key_lock")
    without_content = {f"outbox_{name}" for name in names}
    erased = {model._meta.db_table for model in erasing._TABLES}
    tables = {model._meta.db_table for model in apps.get_app_config("outbox").get_models()}
    assert erased | without_content == tables
    for label, its in hooks.tables.items():
        assert its.content.keys() == {model.__name__ for model in apps.get_app_config(label).get_models()}


# Names that the code or an operator gives, ids, hashes and numbers.
WITHOUT_CONTENT: Final = {
    *("audit.differences", "audit.facts", "bucket", "check_history.answer", "commit_log.tag"),
    *("commit_log.producer_group", "comparison", "consumer", "consumer_group", "consumer_process", "erased"),
    *("fenced_half", "incident.kind", "incident.subject", "leader_lease", "life", "life_sign", "missing_transaction"),
    *("pending_check.park_reason", "pending_check.producer_group", "periodic_pass", "producer_epoch", "producer_group"),
    *("pruned_table", "publisher", "resync", "schema_version", "slot_demand.waiting_for", "subscription"),
    "subscription_limit",
    *("summary", "quarantined_message.tried_on", "vanished_trial", "topic", "unknown_version.event", "broker"),
    *(f"schedule.{name}" for name in (
        "producer_group", "name", "expression", "timezone", "missed", "topic", "content_type", "body",
    )),
}  # fmt: skip


def test_each_column_of_the_broker_is_erased_or_has_no_content(outbox_settings: Callable[..., None]) -> None:
    """A new column must be added to `_PLACES`, or here if it can never contain personal data."""
    with new_world(outbox_settings) as world:
        columns = world.sql(
            "SELECT table_name, column_name FROM information_schema.columns JOIN information_schema.tables"
            " USING (table_schema, table_name) WHERE table_schema = 'outbox' AND table_type = 'BASE TABLE'"
            " AND (data_type IN ('text', 'jsonb', 'bytea') OR udt_name = '_text')"
        )
    erased = {table: statement.text for table, statement in broker_rows._PLACES}
    erased |= {table: getsource(import_module(path.rpartition(".")[0])) for table, path in hooks.broker_content.items()}
    left = {
        f"{table}.{column}"
        for table, column in columns
        if not re.search(rf"\b{column}\b", erased.get(table, "")) and table not in WITHOUT_CONTENT
    }
    assert left - WITHOUT_CONTENT == set()


def test_a_key_that_is_an_id_stays(outbox_settings: Callable[..., None]) -> None:
    with new_world(outbox_settings) as world:
        kept = publish(TOPIC, {"name": MARK}, key="17", at_once=True).message_id
        sequence()
        for rows, options in (({"broker.commit_log": 1}, ["--reason", "request 18"]), ({}, ["--dry-run"])):
            counted = erase(TOPIC, "--message", str(kept), *options)["before"]
            assert (counted["rows"], counted["messages"]) == (rows, 1)
        assert tables_with(MARK, "broker") == []
        assert world.sql("SELECT key FROM outbox.commit_log") == [("17",)]


def test_a_wrong_request_is_refused(outbox_settings: Callable[..., None]) -> None:
    one, reason = str(UUID(int=1)), ("--reason", "a test")
    with new_world(outbox_settings) as world:
        publish(TOPIC, {"name": MARK}, key=MARK, at_once=True)
        for arguments, complaint in (
            (reason, "either --key or --message"),
            (("--key", "17", "--message", one, *reason), "either --key or --message"),
            (("--key", "17", "--with-key", *reason), "fewer than 4 characters"),
            (("--message", one, "--with-key", *reason), "--with-key needs --key"),
            (("--message", one, *reason), "has no message"),
            (("--key", MARK), "--reason is missing"),
        ):
            with pytest.raises(CommandError, match=complaint):
                erase(TOPIC, *arguments)
        assert tables_with(MARK, "broker") == ["broker:outbox.commit_log"]
        assert world.sql("SELECT count(*) FROM outbox.erased") == [(0,)]


@pytest.mark.slow
def test_erasures_are_repeated_after_a_restore(outbox_settings: Callable[..., None], tmp_path: Path) -> None:
    """Both databases are restored to before the erasure; also a message that the broker no longer had then."""
    outbox_settings(FORWARD=FORWARD, ERASURE_LIST=str(tmp_path / "erasures"), ERASURE_SECRET="of the tests")
    with new_world(outbox_settings) as world:
        fill(world)
        copies = {alias: dump(alias_conninfo(alias), tmp_path / alias) for alias in ("broker", "default")}
        # Retention has removed the queued message before the erasure, and only the backup has it.
        world.sql("DELETE FROM outbox.commit_log WHERE deliver_at IS NULL")
        erase(TOPIC, "--key", MARK, "--with-key", "--reason", "request 19")
        for alias, copy in copies.items():
            reload_rows(alias_conninfo(alias), copy)
        before = set(tables_with(MARK, "broker", "default"))
        assert {"broker:outbox.commit_log", "broker:outbox.failure", "default:public.outbox_finding"} <= before

        assert repeat_erasures()["broker.commit_log"] == 2
        assert tables_with(MARK, "broker", "default") == []
        assert repeat_erasures() == {}


# -- handlers of erased messages ---------------------------------------------------------------------------


def troubles(world: World) -> list[tuple[int, ...]]:
    """Failures, dead letters and waiting messages."""
    return world.sql(
        "SELECT (SELECT count(*) FROM outbox.failure), (SELECT count(*) FROM outbox.dead_letter),"
        " (SELECT count(*) FROM outbox.scheduled)"
    )


def test_handlers_see_erased_messages_and_never_fail_at_them(outbox_settings: Callable[..., None]) -> None:
    seen: list[tuple[bool, str]] = []
    called: list[str] = []

    @subscriber("orders", group="aware")
    def aware(delivery: Delivery) -> None:
        seen.append((delivery.erased, "" if delivery.erased else delivery.body["name"]))

    @subscriber("orders", group="inside")
    def inside(delivery: Delivery) -> None:
        called.append("inside")
        Order.objects.create(number=f"{delivery.message_id.hex[-10:]}")
        delivery.body["name"].upper()

    @subscriber("orders", group="outside", effects="outside")
    def outside(delivery: ClaimedDelivery) -> None:
        called.append("outside")
        delivery.body["name"].upper()

    @subscriber("orders", group="batch", batch=10, mode="orderly")
    def batch(deliveries: list[Delivery]) -> None:
        called.append("batch")
        [delivery.body["name"].upper() for delivery in deliveries]

    with new_world(outbox_settings) as world:
        with transaction.atomic():
            erased = [publish("orders", {"name": MARK}, key=str(number)).message_id for number in range(3)]
            publish("orders", {"name": "Bob"}, key="3")
        sequence()
        erase("orders", *(part for one in erased for part in ("--message", str(one))), "--reason", "request 20")
        consume()
        assert sorted(seen) == [(False, "Bob"), (True, ""), (True, ""), (True, "")]
        assert set(called) == {"inside", "outside", "batch"}
        assert troubles(world) == [(0, 0, 0)], "no retry, no dead letter"
        assert Order.objects.count() == 1, "what a failing handler wrote is rolled back"
        handled = InboxEntry.objects.values_list("group").annotate(models.Count("message_id")).order_by("group")
        assert list(handled) == [("aware", 4), ("batch", 4), ("inside", 4), ("outside", 4)]


# -- bodies that are encrypted per subject -----------------------------------------------------------------

KEKS: Final = [base64.b64encode(bytes([number]) * 32).decode() for number in (1, 2)]


@pytest.fixture
def encrypting(outbox_settings: Callable[..., None], tmp_path: Path) -> None:
    outbox_settings(
        KEY_DATABASE="other", KEY_ENCRYPTION_KEYS=[KEKS[0]],
        ERASURE_LIST=str(tmp_path / "erasures"), ERASURE_SECRET="of the tests",
    )  # fmt: skip
    create_key_table("other")
    SubjectKey.objects.using("other").all().delete()


def in_order(found: list[Any]) -> list[str]:
    """Messages of several queues come in any order."""
    return sorted(map(str, found))


def delete_key(*arguments: str) -> None:
    call_command("outbox_subject_key", "delete", *arguments, "--reason", "request 22", "--no-input", stdout=StringIO())


@pytest.mark.usefixtures("encrypting")
def test_deleting_the_key_of_a_subject_erases_also_the_restored_backup(
    outbox_settings: Callable[..., None], tmp_path: Path
) -> None:
    seen: list[Any] = []
    forwarded: list[bytes] = []

    @subscriber("orders", group="mail")
    def mail(delivery: Delivery) -> None:
        seen.append("erased" if delivery.erased else delivery.body)

    @subscriber("orders", group="strict")
    def strict(delivery: Delivery) -> None:
        forwarded.append(delivery.message.body)
        delivery.body["name"].upper()

    with new_world(outbox_settings) as world:
        with transaction.atomic():
            mine = publish("orders", {"name": MARK}, Subject("anna"), key="1")
            publish_many("orders", [{"name": "Bob"}, {"name": "Eve"}], lambda body: Subject(body["name"]), key="2")
        consume()
        assert in_order(seen) == in_order([{"name": MARK}, {"name": "Bob"}, {"name": "Eve"}])
        assert tables_with(MARK, "broker", "default") == [], "the log has no clear body"
        assert pages_with(MARK, [mine.message_id]) == []
        copies = {alias: dump(alias_conninfo(alias), tmp_path / alias) for alias in ("broker", "other")}

        delete_key("anna")
        assert SubjectKey.objects.using("other").filter(subject="anna").count() == 0
        with pytest.raises(CommandError, match="the subject has no key"):
            delete_key("anna")
        for alias, copy in copies.items():
            reload_rows(alias_conninfo(alias), copy)
        assert SubjectKey.objects.using("other").filter(subject="anna").count() == 1, "the control: the key is back"
        # What a worker does when it starts after the restore.
        seen.clear()
        assert repeat_erasures() == {"outbox_subject_key": 1}
        world.sql("UPDATE outbox.consumer_group SET generation = generation + 1")
        world.sql("DELETE FROM outbox.consumer_offset")
        world.sql("DELETE FROM outbox.finished_ahead")
        consume()
        assert in_order(seen) == in_order(["erased", {"name": "Bob"}, {"name": "Eve"}])
        assert troubles(world) == [(0, 0, 0)]
        decoded = [codecs().decode("application/vnd.outbox.encrypted", copy) for copy in forwarded[:3]]
        assert decoded.count(ERASED) == 1, "a copy that was forwarded before"


@pytest.mark.usefixtures("encrypting")
def test_a_message_whose_key_is_missing_waits(outbox_settings: Callable[..., None]) -> None:
    """The key database was restored from a backup that is older than the key."""
    seen: list[Any] = []

    @subscriber("orders", group="mail")
    def mail(delivery: Delivery) -> None:
        seen.append("erased" if delivery.erased else delivery.body)

    with new_world(outbox_settings) as world:
        publish("orders", {"name": MARK}, Subject("anna"), key="1", at_once=True)
        row = SubjectKey.objects.using("other").get()
        SubjectKey.objects.using("other").all().delete()
        subject_keys().forget()
        consume()
        assert (seen, troubles(world)) == ([], [(0, 0, 0)])
        delete_key("--key-id", str(row.key_id))
        consume()
        assert (seen, troubles(world)) == (["erased"], [(0, 0, 0)])


@pytest.mark.usefixtures("encrypting")
def test_a_key_is_not_made_in_a_transaction_that_may_roll_back() -> None:
    def publish_in_a_block() -> None:
        with transaction.atomic():
            publish("orders", {}, Subject("anna"), key="1", using="default")

    with transaction.atomic(using="other"), pytest.raises(UsageError, match="in a transaction on 'other'"):
        publish_in_a_block()
    transaction.set_autocommit(False, using="other")
    try:
        with pytest.raises(UsageError, match="in a transaction on 'other'"):
            publish_in_a_block()
    finally:
        transaction.rollback(using="other")
        transaction.set_autocommit(True, using="other")
    publish_in_a_block()
    assert len(stored()) == 1


class Undone(TestCase):
    """Makes a key in a test, whose end removes the key."""

    __test__ = False
    databases = {"other"}  # noqa: RUF012

    def runTest(self) -> None:
        self.key = subject_keys().key_for("anna")
        assert subject_keys().key_for("anna") == self.key


@pytest.mark.usefixtures("encrypting")
def test_a_key_of_an_earlier_test_is_forgotten() -> None:
    first, second, result = Undone(), Undone(), unittest.TestResult()
    unittest.TestSuite([first, second]).run(result)
    assert result.wasSuccessful(), result.errors + result.failures
    assert first.key != second.key


@pytest.mark.usefixtures("encrypting")
def test_keys_are_rotated(outbox_settings: Callable[..., None]) -> None:
    key_id, key = subject_keys().key_for("anna")
    outbox_settings(KEY_ENCRYPTION_KEYS=[KEKS[1]])
    with pytest.raises(HandlerNotStarted, match="is not in OUTBOX"):
        subject_keys().key_of(key_id)
    outbox_settings(KEY_ENCRYPTION_KEYS=[KEKS[1], KEKS[0]])
    assert subject_keys().key_of(key_id) == key
    call_command("outbox_subject_key", "rotate", "--reason", "yearly", stdout=StringIO())
    outbox_settings(KEY_ENCRYPTION_KEYS=[KEKS[1]])
    assert subject_keys().key_of(key_id) == key


@pytest.mark.usefixtures("encrypting")
def test_a_changed_body_is_refused() -> None:
    key_id, key = subject_keys().key_for("anna")
    data = envelope.encrypt(key_id, key, "application/json", b'{"a":1}')
    assert codecs().decode("application/vnd.outbox.encrypted", data) == {"a": 1}
    with pytest.raises(UndecodableBody, match="changed after its encryption"):
        codecs().decode("application/vnd.outbox.encrypted", data[:-1] + bytes([data[-1] ^ 1]))


# -- workers and the list ----------------------------------------------------------------------------------


def test_without_the_list_nothing_is_consumed_or_erased(outbox_settings: Callable[..., None], tmp_path: Path) -> None:
    listed = tmp_path / "erasures"
    outbox_settings(ERASURE_LIST=str(listed), ERASURE_SECRET="of the tests")
    seen: list[Any] = []

    @subscriber("orders", group="mail")
    def mail(delivery: Delivery) -> None:
        seen.append(delivery)

    with new_world(outbox_settings):
        erased, kept = (publish("orders", {"name": MARK}, key=key, at_once=True).message_id for key in "12")
        sequence()
        erase("orders", "--message", str(erased), "--reason", "request 23")
        listed.write_text("{\n")
        with pytest.raises(OutboxError, match=r"line 1 .* is damaged"):
            consume()
        listed.unlink()
        with pytest.raises(OutboxError, match="does not exist"):
            consume()
        outbox_settings(ERASURE_LIST=str(tmp_path / "nowhere" / "list"), ERASURE_SECRET="of the tests")
        with pytest.raises(CommandError, match="cannot be written"):
            erase("orders", "--message", str(kept), "--reason", "request 24")
        assert tables_with(MARK, "broker") == ["broker:outbox.commit_log"]
    assert seen == []


def test_a_topic_that_a_restored_database_does_not_have_is_left_out(
    outbox_settings: Callable[..., None], tmp_path: Path
) -> None:
    listed = tmp_path / "erasures"
    outbox_settings(ERASURE_LIST=str(listed), ERASURE_SECRET="of the tests")
    line = {"topic": "gone", "replacement": None, "reason": "request 25", "at": "2026-01-01T00:00:00+00:00"}
    entries = [{**line, "kind": "message", "value": str(UUID(int=1))}, {**line, "kind": "key", "value": "0" * 64}]
    listed.write_text("".join(f"{json.dumps(one)}\n" for one in entries))
    with new_world(outbox_settings) as world:
        assert repeat_erasures() == {}
        assert world.sql("SELECT count(*) FROM outbox.erased") == [(2,)]


SLOW: Final = """
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.4); RETURN NULL; END $$;
CREATE TRIGGER slow AFTER INSERT ON {} FOR EACH STATEMENT EXECUTE FUNCTION slow();
"""


def test_timeouts_of_the_databases_do_not_end_what_is_repeated(
    outbox_settings: Callable[..., None], tmp_path: Path
) -> None:
    listed = tmp_path / "erasures"
    outbox_settings(ERASURE_LIST=str(listed), ERASURE_SECRET="of the tests")
    listed.write_text(
        '{"topic": "gone", "replacement": null, "reason": "request 26", "at": "2026-01-01T00:00:00+00:00",'
        f' "kind": "message", "value": "{UUID(int=1)}"}}\n'
    )
    with new_world(outbox_settings) as world:
        for alias, table in (("broker", "outbox.erased"), ("default", ErasureEntry._meta.db_table)):
            database = connections[alias].settings_dict["NAME"]
            # Only new sessions have the timeout.
            world.stack.callback(connections[alias].close)
            world.stack.callback(execute, "DROP FUNCTION slow() CASCADE", alias=alias)
            execute(SLOW.format(table), alias=alias)
            world.stack.callback(execute, f'ALTER DATABASE "{database}" RESET statement_timeout', alias=alias)
            execute(f"ALTER DATABASE \"{database}\" SET statement_timeout = '200ms'", alias=alias)
            connections[alias].close()
        assert repeat_erasures() == {}
        assert world.sql("SELECT count(*) FROM outbox.erased") == [(1,)]


# -- the page ----------------------------------------------------------------------------------------------

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "operations" / "erasure.md"


def test_a_full_disk_leaves_the_list_as_it_was(tmp_path: Path) -> None:
    """The limit on the size of files stands for the full disk: the first write is cut, the second one fails."""
    path = tmp_path / "erasures.jsonl"
    store = ErasureFile(str(path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for last_line in ('{"kind": "key"}\n', '{"kind": "key"}'):
        path.write_text(last_line)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(last_line) + 10, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                store.append('{"kind": "message", "value": "1"}\n')
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.read_text() == last_line
        store.append('{"kind": "message", "value": "2"}\n')
        assert store.read() == '{"kind": "key"}\n{"kind": "message", "value": "2"}\n'


def test_a_line_that_a_crash_cut_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "erasures.jsonl"
    path.write_text('{"kind": "key"}\n{"kind": "mess')
    store = ErasureFile(str(path))
    assert store.read() == '{"kind": "key"}\n'
    store.append('{"kind": "message"}\n')
    assert path.read_text() == '{"kind": "key"}\n{"kind": "message"}\n'


def test_every_command_of_the_page_runs(outbox_settings: Callable[..., None], tmp_path: Path) -> None:
    shell = "\n".join(re.findall(r"^ *```sh\n(.*?)^ *```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))
    lines = [shlex.split(line) for line in shell.splitlines() if line]
    managed = [line[1:] for line in lines if line[0] == "manage.py"]
    assert [line[0] for line in managed] == ["outbox_erase"] * 3 + ["outbox_subject_key"] * 2
    for line in lines:
        if line[0] == "outbox-reconcile":
            assert parser().parse_args(line[1:]).erase is True
    topics = {**settings.OUTBOX["TOPICS"], "customer.moved": {}}
    outbox_settings(
        TOPICS=topics, KEY_DATABASE="other", KEY_ENCRYPTION_KEYS=[KEKS[0]],
        ERASURE_LIST=str(tmp_path / "erasures"), ERASURE_SECRET="of the tests",
    )  # fmt: skip
    call_command("migrate", database="broker", verbosity=0)
    with new_world(outbox_settings) as world:
        call_command("migrate", database="other", verbosity=0)
        SubjectKey.objects.using("other").all().delete()
        publish("customer.moved", {"address": MARK}, key=4711, at_once=True)
        publish("customer.moved", {"address": MARK}, Subject(4711), key=4711, at_once=True)
        outbox_settings(KEY_ENCRYPTION_KEYS=[KEKS[1], KEKS[0]])
        for line in managed:
            more = [] if "--dry-run" in line else ["--no-input"]
            call_command(*line, *more, stdout=StringIO())
        assert tables_with(MARK, "broker") == []
        assert world.sql("SELECT DISTINCT content_type FROM outbox.commit_log") == [("application/vnd.outbox.erased",)]
        assert SubjectKey.objects.using("other").get().deleted_at is not None


# -- databases or the list that are away when a process starts --------------------------------------


WAITS: Final = "consuming cannot begin yet"
# The processes that compare the list at their start.
ROLES: Final[dict[str, Sequence[str]]] = {
    "consumer": ["-m", "outbox.contrib.django.worker.child", "consumer"],
    "forward": ["-m", "django", "outbox_worker", "--role", "forward"],
}


@contextlib.contextmanager
def refusing(server_url: str, alias: str) -> Iterator[None]:
    """The database of an alias refuses new connections during the block."""
    name = str(psycopg.conninfo.conninfo_to_dict(alias_conninfo(alias))["dbname"])
    with psycopg.connect(server_url, autocommit=True) as admin:
        allow = sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}")
        admin.execute(allow.format(sql.Identifier(name), sql.SQL("false")))
        try:
            yield
        finally:
            admin.execute(allow.format(sql.Identifier(name), sql.SQL("true")))


@pytest.mark.parametrize("role", ["consumer", pytest.param("forward", marks=pytest.mark.slow)])
def test_a_process_waits_for_its_databases_and_then_does_its_work(role: str, server_url: str, tmp_path: Path) -> None:
    """The list has the erasure of a message that the broker has with its body, as after a restore.

    The handler needs only the key of an erased message. Forwarding sends no erased message.
    """
    beats, log, listed = tmp_path / "heartbeat", tmp_path / "log", tmp_path / "erasures"
    got: list[Request] = []
    expected = {"consumer": ["1", "2"], "forward": ["2"]}[role]
    erased = place("1").message_id
    place("2")
    sequence()
    entry = Erasure(kind="message", topic="orders", value=str(erased), reason="request 30", at=datetime.now(UTC))
    erasure_list.append(ErasureFile(str(listed)), [entry])

    def handled() -> list[str]:
        if role == "forward":
            return sorted(json.loads(request.body)["number"] for request in got)
        return sorted(Effect.objects.values_list("number", flat=True))

    def waits_for(alias: str) -> None:
        said = f'"{psycopg.conninfo.conninfo_to_dict(alias_conninfo(alias))["dbname"]}" is not currently accepting'
        eventually(
            lambda: any(WAITS in line and said in line for line in log.read_text().splitlines()),
            within_seconds=60,
            what=log.read_text,
        )
        alive = heartbeat.listen(beats)
        assert (alive.is_alive(within_seconds=30), alive.is_ready, handled()) == (True, False, [])

    with contextlib.ExitStack() as default_away, contextlib.ExitStack() as broker_away, serving(keeping(got)) as port:
        default_away.enter_context(refusing(server_url, "default"))
        broker_away.enter_context(refusing(server_url, "broker"))
        outbox = {
            "ERASURE_LIST": str(listed),
            "ERASURE_SECRET": "of the tests",
            "FORWARD": {"billing": webhook(port)},
        }
        with process(ROLES[role], outbox=outbox, log=log, variables={heartbeat.VARIABLE: str(beats)}) as started:
            waits_for("broker")
            broker_away.close()
            waits_for("default")
            default_away.close()
            eventually(lambda: handled() == expected, within_seconds=60, what=log.read_text)
            assert started.poll() is None, "the same process has waited"
    assert handled() == expected
    assert "erasures were repeated after a restore: {'broker.commit_log': 1}" in log.read_text()


def test_a_process_that_waits_can_be_stopped(
    outbox_settings: Callable[..., None], tmp_path: Path, server_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    outbox_settings(ERASURE_LIST=str(tmp_path / "erasures"), ERASURE_SECRET="of the tests")
    stop = threading.Event()
    with refusing(server_url, "broker"), caplog.at_level(logging.WARNING):
        waiting = threading.Thread(target=wait_until_prepared, args=[stop])
        waiting.start()
        eventually(lambda: WAITS in caplog.text)
        stop.set()
        waiting.join(timeout=20)
    assert not waiting.is_alive()


class Store:
    """A store of the list in another place, which does not answer at first."""

    reads = 0

    def read(self) -> str | None:
        Store.reads += 1
        if Store.reads == 1:
            raise TimeoutError("the store answers too late")
        return ""

    def append(self, lines: str) -> None:
        raise NotImplementedError


def test_a_process_waits_for_the_store_of_the_list(
    outbox_settings: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    outbox_settings(ERASURE_LIST=f"{__name__}.Store", ERASURE_SECRET="of the tests")
    with caplog.at_level(logging.WARNING):
        wait_until_prepared(threading.Event())
    assert (
        WAITS in caplog.text and "(OUTBOX['ERASURE_LIST']) does not answer: the store answers too late" in caplog.text
    )
    assert Store.reads == 2


def test_a_list_that_cannot_be_read_ends_the_process(outbox_settings: Callable[..., None], tmp_path: Path) -> None:
    outbox_settings(ERASURE_LIST=str(tmp_path), ERASURE_SECRET="of the tests")
    with pytest.raises(OutboxError, match="cannot be read"):
        wait_until_prepared(threading.Event())
