"""A consumer group gets another name and keeps everything: positions, retries, dead letters, inbox rows."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connections, transaction

from outbox import Delivery
from outbox.broker.database.executor import Executor
from outbox.broker.operations.dead_letters import list_dead_letters
from outbox.contrib.django import publish, subscriber
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.ledger import renaming as rows
from outbox.contrib.django.models import InboxEntry
from outbox.contrib.django.subscribers import registry
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.errors import PermanentError
from outbox.retry import RetryPolicy
from tests.django.processes import ROOT, environment
from tests.django.shop.models import Effect
from tests.django.support import sequence
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("no_subscribers")

_numbers = itertools.count()


@pytest.fixture
def names() -> tuple[str, str]:
    """Groups stay in the broker of some of these tests."""
    number = next(_numbers)
    return f"shipping-{number}", f"dispatch-{number}"


def subscribe(group: str) -> None:
    registry.unregister_all()

    @subscriber("orders", group=group, start="earliest", retry=RetryPolicy(delays_seconds=(0.1,)))
    def ship(delivery: Delivery) -> None:
        if delivery.key == "poison":
            raise PermanentError("cannot ever work")
        if delivery.key == "later" and delivery.attempt == 1:
            raise ValueError("not yet")
        Effect.objects.create(number=delivery.key)


def consume(group: str, *keys: str) -> None:
    subscribe(group)
    for key in keys:
        with transaction.atomic():
            publish("orders", {}, key=key)
    sequence()
    consumer_runtime().run_once()


def rename(*arguments: str) -> str:
    out = StringIO()
    call_command("outbox_group", "rename", *arguments, stdout=out, no_color=True)
    return out.getvalue()


def effects() -> Counter[str]:
    return Counter(Effect.objects.values_list("number", flat=True))


def on_broker(statement: str) -> list[tuple[Any, ...]]:
    with broker_connection() as (connection, _):
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


@pytest.mark.usefixtures("path")
def test_a_renamed_group_handles_nothing_twice_and_loses_nothing(
    names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = names
    monkeypatch.setattr(rows, "BATCH", 2)
    consume(old, "one", "two", "three", "poison", "later")
    publish("orders", {}, key="unread", at_once=True)
    assert effects() == Counter(["one", "two", "three"])
    said = rename(old, new)
    assert new in said and "3" in said
    consume(new, "four")
    # The inbox knows, not only the offsets.
    call_command("outbox_group", "reset", new, "orders", "--to-earliest", stdout=StringIO())

    def all_handled() -> bool:
        sequence()
        consumer_runtime().run_once()
        return "later" in effects()

    eventually(all_handled, what="the retry under the new name")
    assert effects() == Counter(["one", "two", "three", "later", "unread", "four"])
    with broker_connection() as (connection, schema):
        run = Executor(connection, schema)
        assert [letter.key for letter in list_dead_letters(run, new)] == ["poison"]
    assert on_broker(f"SELECT 1 FROM outbox.consumer_group WHERE name = '{old}'") == []
    assert on_broker(f"SELECT 1 FROM outbox.topic WHERE name = '%RETRY%{new}'") == [(1,)]


@pytest.mark.usefixtures("databases")
@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("rename.reserved", marks=pytest.mark.slow),
        "rename.copying",
        pytest.param("rename.copied", marks=pytest.mark.slow),
        pytest.param("rename.renamed", marks=pytest.mark.slow),
    ],
)
def test_killed_in_the_middle_and_run_again(moment: str, names: tuple[str, str]) -> None:
    old, new = names
    consume(old, "one", "two", "three")
    command = [sys.executable, "-m", "django", "outbox_group", "rename", old, new]
    killed = subprocess.run(
        command, cwd=ROOT, env=environment(faults=f"{moment}=kill"), capture_output=True, check=False, timeout=60
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    if moment != "rename.renamed":
        # Whichever name a worker has now, no effect happens again.
        consume(new)
        assert effects() == Counter(["one", "two", "three"])
    again = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, check=False, timeout=60)
    assert again.returncode == 0, again.stderr.decode()
    consume(new, "four")
    call_command("outbox_group", "reset", new, "orders", "--to-earliest", stdout=StringIO())
    consumer_runtime().run_once()
    assert effects() == Counter(["one", "two", "three", "four"])


@pytest.mark.usefixtures("databases")
def test_what_is_refused(names: tuple[str, str]) -> None:
    old, new = names
    with pytest.raises(CommandError, match="not known"):
        rename(old, new)
    consume(old, "one")
    for wrong, said in (("%x", "not allowed"), (old, "are the same")):
        with pytest.raises(CommandError, match=said):
            rename(old, wrong)
    consume(new, "two")
    with pytest.raises(CommandError, match=rf"(?s){new}.* has handled messages.*outbox_group delete {new}"):
        rename(old, new)
    for group in names:
        on_broker(
            "INSERT INTO outbox.consumer (instance_id, group_id, topics, host, pid, expires_at)"
            f" SELECT gen_random_uuid(), group_id, '{{orders}}', 'host', 1, now() + interval '1 hour'"
            f" FROM outbox.consumer_group WHERE name = '{group}'"
        )
        with pytest.raises(CommandError, match=f"1 consumers are alive: '{group}'"):
            rename(old, new)
        on_broker("DELETE FROM outbox.consumer")
    call_command("outbox_group", "delete", new, "--no-input", stdout=StringIO())
    assert "nothing was changed" in rename(old, new, "--dry-run").lower()
    assert on_broker(f"SELECT 1 FROM outbox.consumer_group WHERE name = '{new}'") == []
    assert json.loads(rename(old, new, "--json"))["after"]["renamed"] is True


@pytest.mark.usefixtures("databases")
def test_a_handler_that_is_still_in_its_transaction_is_waited_for_and_named(
    names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process lost its lease, and its row is not there yet."""
    old, new = names
    monkeypatch.setattr(rows, "PATIENCE_SECONDS", 0.2)
    consume(old, "one")
    other = connections.create_connection("default")
    try:
        other.set_autocommit(False)
        with other.cursor() as cursor:
            cursor.execute("UPDATE outbox_inbox SET generation = generation WHERE consumer_group = %s", [old])
            cursor.execute("SELECT pg_backend_pid()")
            [pid] = cursor.fetchone()
        with pytest.raises(CommandError, match=rf"session {pid}.*run this command again"):
            rename(old, new)
        other.rollback()
        rename(old, new)
    finally:
        other.close()
    assert InboxEntry.objects.filter(group=new).count() == 1


@pytest.mark.usefixtures("databases")
def test_a_consumer_that_ran_meanwhile_is_noticed(names: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = names
    consume(old, "one")
    copy: Callable[..., int] = rows.copy

    def consumed_meanwhile(*arguments: Any) -> int:
        copied = copy(*arguments)
        if connections["default"].alias == arguments[0].alias:
            consume(old, "two")
        return copied

    with monkeypatch.context() as patch:
        patch.setattr(rows, "copy", consumed_meanwhile)
        with pytest.raises(CommandError, match="have run since the rename began"):
            rename(old, new)
    rename(old, new)
    consume(new)
    call_command("outbox_group", "reset", new, "orders", "--to-earliest", stdout=StringIO())
    consumer_runtime().run_once()
    assert effects() == Counter(["one", "two"])
