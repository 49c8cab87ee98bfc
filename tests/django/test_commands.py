"""The management commands: they parse, call one function, and say clearly what is wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.core.management.base import CommandError
from django.db import connections

from outbox import Delivery
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.operations import summary
from outbox.contrib.django import publish, subscriber
from outbox.contrib.django.actions.cells import group_link
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.management import commands
from outbox.contrib.django.operations.watching import look
from outbox.contrib.django.worker import drain
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.errors import PermanentError
from tests.django.conftest import point_alias
from tests.django.processes import process
from tests.django.shop.models import Effect
from tests.django.support import call, call_json, ended, sequence

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers")


def consume() -> None:
    sequence()
    consumer_runtime().run_once()


@pytest.fixture
def _effects(no_subscribers: None) -> None:
    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        if delivery.tag == "poison":
            raise PermanentError("cannot ever work")
        Effect.objects.create(number=delivery.key)


HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e\nPROBLEM: forged\r"


def test_what_steers_a_terminal_is_inert_in_every_output(no_subscribers: None) -> None:
    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        raise PermanentError(f"cannot work: {delivery.key}")

    receipt = publish("orders", {}, key=HOSTILE, at_once=True)
    consume()
    for arguments in (
        ["outbox_message", "show", str(receipt.message_id)],
        ["outbox_dead_letter", "list"],
        ["outbox_group", "offsets", "effects"],
        ["outbox_status"],
    ):
        for more in ([], ["--json"]):
            _, text = ended(*arguments, *more)
            assert text.replace("\n", "").isprintable(), (arguments, more)
            assert "\nPROBLEM: forged" not in text
    assert r"\x1b[2J" in call("outbox_message", "show", str(receipt.message_id))
    assert call_json("outbox_message", "show", str(receipt.message_id))["messages"][0]["key"] == HOSTILE
    with pytest.raises(CommandError) as caught:
        call("outbox_group", "pause", HOSTILE)
    assert str(caught.value).replace("\n", "").isprintable()


def test_commands_print_by_what_makes_it_inert() -> None:
    folder = Path(commands.__file__).parent
    assert [path.name for path in folder.glob("*.py") if "stdout.write" in path.read_text()] == []


@pytest.mark.parametrize("where", ["BROKER", "LISTEN_URL"])
def test_a_command_does_not_repeat_a_password(settings: Any, where: str) -> None:
    settings.OUTBOX = {**settings.OUTBOX, where: "postgresql://shop:a@hunter2@host/db"}
    with pytest.raises(CommandError) as caught:
        call("outbox_topic", "list")
    assert f"OUTBOX['{where}']" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_project_without_addresses_lists_processes_with_their_groups(settings: Any) -> None:
    """A project that only handles messages, like that of docs/celery.md, has no ROOT_URLCONF."""
    del settings.ROOT_URLCONF
    assert group_link("mail") == "mail"


def test_bad_input_is_explained() -> None:
    cases: list[tuple[list[str], str]] = [
        (["outbox_group", "pause", "nobody"], "'nobody' is not known"),
        (["outbox_group", "reset", "nobody", "orders", "--to-latest"], "'nobody' is not known"),
        (["outbox_group", "reset", "effects", "orders"], "--to-time"),
        (["outbox_group", "reset", "g", "orders", "--to-time", "yesterday"], "write it like"),
        (["outbox_group", "reset", "g", "orders", "--to-time", "2026-01-01T00:00:00"], "time zone"),
        (["outbox_group", "reset", "g", "orders", "--to-offset", "-1"], "expected one argument|not a whole number"),
        (["outbox_group", "reset", "g", "orders", "--to-offset", "two"], "'two' is not a whole number"),
        (["outbox_install", "--drop", "--patience", "2073601"], "at least 0 and at most 2,073,600"),
        (["outbox_group", "offsets", "nobody"], "'nobody' is not known"),
        (["outbox_dead_letter", "list", "nobody"], "'nobody' is not known"),
        (["outbox_dead_letter", "replay", "nobody", "--all", "--dry-run"], "'nobody' is not known"),
        (["outbox_dead_letter", "replay", "g"], "--all"),
        (["outbox_worker", "--group", "effects"], "--group needs --role consumer"),
        (["outbox_worker", "--drain", "--role", "broker"], "leave --role out"),
        (["outbox_worker", "--until-drained", "--role", "broker"], "leave --role out"),
        (["outbox_worker", "--until-drained", "--drain"], "pass only one of the two options"),
        (["outbox_message", "show", "not-an-id"], "invalid UUID"),
        (["outbox_message", "show", str(uuid4())], "has no message"),
        (["outbox_worker", "--role", "boss"], "invalid choice"),
    ]
    for arguments, complaint in cases:
        with pytest.raises(CommandError, match=complaint):
            call(*arguments)


def test_without_a_broker_commands_say_so(
    outbox_settings: Callable[..., None], new_database: Callable[..., str]
) -> None:
    point_alias("broker", new_database())
    for command in (
        ["outbox_transaction", "ask", "--all"],
        ["outbox_audit"],
        ["outbox_topic", "list"],
        ["outbox_group", "offsets", "effects"],
    ):
        with pytest.raises(CommandError, match="migrate --database"):
            call(*command)
    connections["broker"].close()
    outbox_settings(IN_MEMORY=True)
    with pytest.raises(CommandError, match="IN_MEMORY"):
        call("outbox_status")


def test_a_worker_without_subscribers_reports_it() -> None:
    with pytest.raises(CommandError, match="no @subscriber"):
        call("outbox_worker", "--role", "consumer")


_HIDDEN = "hunter2secret"


def test_no_command_prints_a_masked_field(outbox_settings: Callable[..., None]) -> None:
    """Of bodies and headers, and of errors that a handler made of them."""
    outbox_settings(MASKED_FIELDS={"orders": ["Password"], "*": ["token"]})

    @subscriber("orders", group="effects")
    def fails(delivery: Delivery) -> None:
        raise PermanentError(f"cannot use {delivery.body} of {delivery.headers}, {delivery.body['login']['password']}")

    body = {"login": {"password": _HIDDEN, "user": "ada"}, "visible": "shown"}
    receipt = publish("orders", body, key="k", headers={"token": _HIDDEN + "2"}, at_once=True)
    consume()
    number = str(receipt.message_id)
    for arguments in (
        ["outbox_dead_letter", "list"],
        ["outbox_message", "show", number],
        ["outbox_message", "list", "orders"],
    ):
        for form in ([], ["--json"]):
            said = call(*arguments, *form)
            assert _HIDDEN not in said, said
            assert "***" in said, said
    assert "ada" in call("outbox_message", "list", "orders", "--json")


def test_a_closed_pipe_ends_a_command_without_a_traceback() -> None:
    for number in range(200):
        publish("orders", {"text": "x" * 2000}, key=str(number), at_once=True)
    arguments = ["-m", "django", "outbox_message", "list", "orders", "--uncommitted", "--json", "--limit", "200"]
    # Unbuffered, Python drops the end of a long line that is written in part, and notices nothing.
    with process(arguments, variables={"PYTHONUNBUFFERED": ""}) as command:
        assert command.stdout is not None and command.stderr is not None
        command.stdout.readline()
        command.stdout.close()
        assert command.stderr.read() == ""
        assert command.wait(timeout=60) == 141


def test_a_restart_is_no_condition_and_an_absence_is(outbox_settings: Callable[..., None]) -> None:
    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None: ...

    def severity() -> str | None:
        found = {one.name: one.severity.name for one in look().verdict.conditions}
        return found.get("no_worker")

    publish("orders", {}, key="first", at_once=True)
    consume()
    with broker_connection() as (connection, schema):
        run = Executor(connection, schema)
        publish("orders", {}, key="waits", at_once=True)
        sequence()
        summary.refresh(run)
        assert severity() is None, "the consumer has just left"
        for seconds, expected in ((15, "WARNING"), (60, "CRITICAL")):
            connection.execute(f"UPDATE outbox.queue_lease SET expires_at = now() - interval '{seconds} s'".encode())
            assert severity() == expected


_HELD_BY_ANOTHER = Statement("""
UPDATE {schema}.queue_lease
SET owner = %(owner)s, epoch = epoch + 1, expires_at = clock_timestamp() + make_interval(secs => %(seconds)s)
""")


def hold_queues(owner: UUID, seconds: float) -> None:
    """Leave the queues as a consumer process does that holds them for so long."""
    with broker_connection() as connection:
        assert Executor(*connection).count(_HELD_BY_ANOTHER, {"owner": owner, "seconds": seconds}) > 0


@pytest.mark.usefixtures("_effects")
def test_drain_waits_for_the_queues_of_a_process_that_was_killed(outbox_settings: Callable[..., None]) -> None:
    outbox_settings(LEASE_SECONDS=2.0)
    consume()
    publish("orders", {}, key="late", at_once=True)
    sequence()
    hold_queues(uuid4(), 1.0)
    assert "deliveries handled: 1" in call("outbox_worker", "--drain")
    assert list(Effect.objects.values_list("number", flat=True)) == ["late"]


@pytest.mark.usefixtures("_effects")
def test_drain_handles_the_queues_of_a_process_whose_lease_ends_meanwhile(
    outbox_settings: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease expires after the queues were drained, and before the command looks who holds queues."""
    outbox_settings(LEASE_SECONDS=2.0)
    consume()
    publish("orders", {}, key="late", at_once=True)
    sequence()
    hold_queues(uuid4(), 1.0)
    pauses, real = [1.1], drain.drain

    def drained() -> drain.DrainCounts:
        counts = real()
        time.sleep(pauses.pop() if pauses else 0)
        return counts

    monkeypatch.setattr(drain, "drain", drained)
    assert "deliveries handled: 1" in call("outbox_worker", "--drain")


@pytest.mark.usefixtures("_effects")
def test_drain_leaves_the_queues_of_a_live_process_and_says_so(outbox_settings: Callable[..., None]) -> None:
    outbox_settings(LEASE_SECONDS=1.0)
    consume()
    publish("orders", {}, key="late", at_once=True)
    sequence()
    hold_queues(uuid4(), 600.0)  # longer than a lease: this process renews it
    assert "1 messages wait in queues of other running consumer processes" in call("outbox_worker", "--drain")
    assert Effect.objects.count() == 0
