"""The management commands: they parse, call one function, and say clearly what is wrong."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connections, transaction
from django.urls import reverse

from outbox import Delivery, Message
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.log import incidents
from outbox.broker.log.incidents import Incident
from outbox.broker.operations import summary
from outbox.broker.operations.audit import count_messages
from outbox.broker.operations.broker_conditions import SETTLED_BY_OPERATORS
from outbox.contrib.django import message, publish, publish_messages, run_check_back, subscriber
from outbox.contrib.django.actions.cells import group_link
from outbox.contrib.django.database.aliases import on_broker
from outbox.contrib.django.engine.broker import get_broker
from outbox.contrib.django.ledger.pruning import run_prune
from outbox.contrib.django.management import commands
from outbox.contrib.django.models import InboxEntry
from outbox.contrib.django.operations.watching import look
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.worker import drain
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.errors import PermanentError
from tests.django.broker_world import new_world
from tests.django.conftest import point_alias
from tests.django.faults import wrong_ledger
from tests.django.operators import ALL, client_of, make_user
from tests.django.processes import process
from tests.django.sessions import broker_connection
from tests.django.shop.models import Effect
from tests.django.state import decisions, effects, execute, rolled_back
from tests.django.support import call, call_json, consume, ended, handle_all, sequence
from tests.part_apps import has

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers")


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
def test_drain_needs_no_producer_group(settings: Any) -> None:
    consume()
    publish("orders", {}, key="alone", at_once=True)
    settings.OUTBOX = {name: one for name, one in settings.OUTBOX.items() if name != "PRODUCER_GROUP"}
    assert "messages queued: 1, deliveries handled: 1" in call("outbox_worker", "--drain")


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


# -- settling: undecided transactions and dead letters ----------------------------------------------


DUE = Statement("SELECT count(*) FROM {schema}.pending_check WHERE due_at <= now()")
PAUSED = Statement("SELECT paused FROM {schema}.consumer_group WHERE name = %(name)s")


def undecided(*keys: str) -> list[UUID]:
    """Committed transactions whose end got lost, scanned, and parked for an hour."""
    stored: list[Message] = [message("orders", {}, key=key) for key in keys]
    for one in stored:
        with transaction.atomic():
            publish_messages([one])
            connections["default"].run_on_commit.clear()
    get_broker().claim_checks(get_settings().producer_group)
    with broker_connection() as (connection, _):
        connection.execute(
            "UPDATE outbox.pending_check SET parked_at = now(), park_reason = 'checks', due_at = now() + '1 hour'"
        )
    return [one.message_id for one in stored]


def due() -> int:
    with broker_connection() as (connection, schema):
        [count] = Executor(connection, schema).one(DUE)
    return int(count)


def test_a_decision_is_rehearsed_without_effect() -> None:
    [one] = undecided("kept")
    rehearsed = call_json("outbox_transaction", "decide", str(one), "commit", "--dry-run")
    assert (rehearsed["action"], rehearsed["outcome"], rehearsed["dry_run"]) == ("decide", "planned", True)
    assert "The ledger says now: COMMIT" in rehearsed["caution"]
    with pytest.raises(CommandError, match="not what the ledger proves"):
        call("outbox_transaction", "decide", str(one), "rollback", "--dry-run")
    assert "Nothing was changed" in call("outbox_transaction", "decide", str(one), "rollback", "--dry-run", "--force")
    assert decisions() == {"kept": None}
    done = call_json("outbox_transaction", "decide", str(one), "commit")
    assert (done["outcome"], done["after"]["status"], done["after"]["decision"]) == ("done", "applied", "C")
    assert decisions() == {"kept": "C"}
    with pytest.raises(CommandError, match="not an undecided transaction"):
        call("outbox_transaction", "decide", str(one), "commit", "--dry-run")


def test_rehearsing_a_rollback_writes_no_tombstone() -> None:
    with rolled_back():
        receipt = publish("orders", {}, key="dropped")
    one = str(receipt.transaction_id)
    assert "While the action runs, the barrier of the ledger decides" in call(
        "outbox_transaction", "decide", one, "rollback", "--dry-run"
    )
    assert execute("SELECT count(*) FROM outbox_ledger WHERE transaction_id = %s", one)[0] == (0,)
    with pytest.raises(CommandError, match="not what the ledger proves"):
        call("outbox_transaction", "decide", one, "commit", "--dry-run")
    assert "applied" in call("outbox_transaction", "decide", one, "rollback")


def test_producers_are_asked_again_about_those_that_are_named_or_selected() -> None:
    one, other, third = undecided("a", "b", "c")
    assert due() == 0
    assert "The checks of 1 transaction " in call("outbox_transaction", "ask", str(one), "--dry-run")
    assert due() == 0
    assert call_json("outbox_transaction", "ask", str(one))["after"]["transaction_ids"] == [str(one)]
    assert due() == 1
    with pytest.raises(CommandError, match="No check was requested"):
        call("outbox_transaction", "ask", str(other), str(uuid4()))
    assert due() == 1
    assert call_json("outbox_transaction", "ask", "--group", "nobody")["outcome"] == "nothing"
    parked = call_json("outbox_transaction", "list", "--parked", "--group", "shop")
    assert [(one["transaction_id"], one["state"]) for one in parked] == [
        (str(one), "parked") for one in (one, other, third)
    ]
    assert "One action checks at most 2 transactions" in call("outbox_transaction", "ask", "--parked", "--limit", "2")
    assert due() == 2
    assert call_json("outbox_transaction", "ask", "--all")["after"]["transaction_ids"] == [
        str(one),
        str(other),
        str(third),
    ]
    assert run_check_back().committed == 3
    assert decisions() == {"a": "C", "b": "C", "c": "C"}


def test_further_messages_ask_about_their_transaction() -> None:
    first, second = message("orders", {}, key="a"), message("orders", {}, key="b")
    with transaction.atomic():
        publish_messages([first, second])
        connections["default"].run_on_commit.clear()
    for given in ([first, second], [second]):
        asked = call_json("outbox_transaction", "ask", *(str(one.message_id) for one in given))["after"]
        assert asked["transaction_ids"] == [str(first.message_id)]
        assert "No process answers" in asked["no_answer"]


@pytest.mark.parametrize("arguments", [[], ["--all", "--parked"], [str(uuid4()), "--all"]])
def test_the_arguments_of_ask_are_checked(arguments: list[str]) -> None:
    with pytest.raises(CommandError, match="name transaction ids"):
        call("outbox_transaction", "ask", *arguments)


def test_a_producer_group_that_is_gone_is_forgotten_and_one_that_is_in_use_is_not() -> None:
    run_check_back()
    run_prune()
    with pytest.raises(CommandError, match="'shop' was not forgotten: one of its processes began the pass check_back"):
        call("outbox_transaction", "forget", "shop")
    execute("UPDATE outbox.periodic_pass SET began_at = began_at - interval '1 day'", alias="broker")
    assert "check_back_late" in ended("outbox_status", "--json")[1]
    [late, *_] = undecided("late")
    with pytest.raises(CommandError, match=r"it has undecided transactions \(1\)"):
        call("outbox_transaction", "forget", "shop")
    call("outbox_transaction", "decide", str(late), "commit", "--no-input")
    call("outbox_transaction", "forget", "shop")
    assert execute("SELECT FROM outbox.periodic_pass, outbox.pruned_table", alias="broker") == []


@pytest.fixture
def _three_dead_of_two_groups(databases: None, no_subscribers: None) -> None:
    for group in ("effects", "points"):

        @subscriber("orders", group=group)
        def give_up(delivery: Delivery) -> None:
            raise PermanentError(f"never: {delivery.key}\nand a second line")

    for key in ("a", "b", "c"):
        publish("orders", {}, key=key, at_once=True)
    consume()


def pages(*arguments: str) -> list[Any]:
    """Every page of a list, by the command that the end of each page names."""
    found, more = [], list[str]()
    while page := call_json(*arguments, *more):
        found.append(page)
        said = call(*arguments, *more).splitlines()[-1]
        if not said.startswith("there may be more rows: pass "):
            break
        more = said.removeprefix("there may be more rows: pass ").split()
    return found


@pytest.mark.usefixtures("_three_dead_of_two_groups")
def test_dead_letters_come_page_by_page() -> None:
    of_one = pages("outbox_dead_letter", "list", "effects", "--limit", "1")
    assert [len(page) for page in of_one] == [1, 1, 1]
    assert sorted(page[0]["letter"]["key"] for page in of_one) == ["a", "b", "c"]
    with broker_connection() as (connection, _):
        connection.execute("UPDATE outbox.dead_letter SET dead_at = '2026-01-01 00:00:00.123456+00'")
    of_all = [item["letter"] for page in pages("outbox_dead_letter", "list", "--limit", "3") for item in page]
    assert sorted((item["group"], item["key"]) for item in of_all) == [
        (group, key) for group in ("effects", "points") for key in "abc"
    ], "the whole of a batch that was given up in one transaction, nothing twice"
    with pytest.raises(CommandError, match="is not a position"):
        call("outbox_dead_letter", "list", "--after", "2026-01-01")


@pytest.mark.usefixtures("_three_dead_of_two_groups")
def test_one_dead_letter_is_shown_whole() -> None:
    letter = call_json("outbox_dead_letter", "list", "effects", "--key", "b")[0]["letter"]
    shown = call_json("outbox_message", "show", letter["message_id"])
    assert {one["group"]: one["error"] for one in shown["dead_letters"]}["effects"] == letter["error"]
    assert [one["attempt"] for one in shown["failures"] if one["group"] == "effects"] == [0]
    text = call("outbox_message", "show", letter["message_id"])
    assert "key b," in text
    assert "    and a second line\n" in text
    call("outbox_dead_letter", "discard", "effects", letter["message_id"], "--no-input")
    assert "discarded_at 2" in call("outbox_message", "show", letter["message_id"])


# -- conditions of events ------------------------------------------------------------------------------------------


def events() -> dict[str, int]:
    """The conditions that hold because of an incident, with their counts."""
    wanted = {*SETTLED_BY_OPERATORS, "wrong_ledger"}
    return {one.name: one.count for one in look().verdict.conditions if one.name in wanted}


def test_an_operator_ends_the_conditions_of_events(outbox_settings: Callable[..., None]) -> None:
    with new_world(outbox_settings) as world:
        wrong_ledger(world)
        kinds = sorted(SETTLED_BY_OPERATORS.values())
        incidents.record(
            world.run, [Incident(kind, f"subject {one}", "its detail") for kind in kinds for one in (1, 2)]
        )
        of_all = {**dict.fromkeys(SETTLED_BY_OPERATORS, 2), "wrong_ledger": 1}
        assert events() == of_all
        planned = call_json("outbox_audit", "settle", "--condition", "expired", "--dry-run")
        assert (planned["outcome"], planned["before"], events()) == ("planned", {"expired": 2}, of_all)
        done = call_json("outbox_audit", "settle", "--condition", "expired", "--reason", "the group is gone")
        assert (done["outcome"], done["after"]) == ("done", {"settled": 2})
        assert events() == {name: count for name, count in of_all.items() if name != "expired"}
        assert call_json("outbox_audit", "settle", "--condition", "expired")["outcome"] == "nothing"
        # An undecided transaction that needs the ledger is not settled together with the other incidents.
        everything = [word for name in SETTLED_BY_OPERATORS for word in ("--condition", name)]
        assert call_json("outbox_audit", "settle", *everything)["after"] == {"settled": 6}
        assert events() == {"wrong_ledger": 1}
        incidents.record(world.run, [Incident("expired", "orders", "again")])
        assert events() == {"expired": 1, "wrong_ledger": 1}
        world.sql("INSERT INTO outbox.op_log (transaction_id, decision, decided_by, log_ids)"
                  " SELECT transaction_id, 'R', 'O', '{}' FROM outbox.pending_check")  # fmt: skip
        assert events() == {"expired": 1}, "the ledger is needed no more"
        kept = world.sql("SELECT subject, detail FROM outbox.incident WHERE kind = 'settled' ORDER BY detail, subject")
        assert kept == [(f"subject {one}", f"{kind}: its detail") for kind in kinds for one in (1, 2)]
        with pytest.raises(CommandError, match="invalid choice: 'lag'"):
            call("outbox_audit", "settle", "--condition", "lag")


# -- delivering again -------------------------------------------------------------------------------


def subscribe(*groups: str) -> None:
    for group in groups:

        @subscriber("orders", group=group)
        def effect(delivery: Delivery, group: str = group) -> None:
            Effect.objects.create(number=f"{group} {delivery.key}")

    consumer_runtime().run_once()


def redeliver(message_id: UUID, group: str, *options: str) -> str:
    return call("outbox_message", "redeliver", str(message_id), "--group", group, "--no-input", *options)


def counted(group: str) -> dict[str, int]:
    """The group's terms; every equation holds."""
    counts = on_broker(count_messages)
    assert counts.differences() == []
    found = counts.groups[group]
    return {name: getattr(found, name) for name in ("queued", "handled", "retrying", "dead", "discarded")}


@pytest.mark.usefixtures("no_events")
def test_a_missing_effect_is_made_again_for_one_group_whether_its_inbox_row_is_there_or_not() -> None:
    subscribe("effects", "others")
    first, second, _ = [publish("orders", {}, key=key, at_once=True).message_id for key in "123"]
    handle_all()
    every = [f"{group} {key}" for group in ("effects", "others") for key in "123"]
    assert effects() == every
    assert counted("effects") == {"queued": 3, "handled": 3, "retrying": 0, "dead": 0, "discarded": 0}

    shown = redeliver(first, "effects", "--dry-run")
    assert "Nothing was changed" in shown and "Messages that the handler publishes are published a second time" in shown
    handle_all()
    assert effects() == every

    Effect.objects.filter(number__in=["effects 1", "effects 2"]).delete()
    InboxEntry.objects.filter(group="effects", message_id=second).delete()
    for message_id in (first, second):
        assert "Done." in redeliver(message_id, "effects")
    assert counted("effects") == {"queued": 5, "handled": 3, "retrying": 2, "dead": 0, "discarded": 0}
    with pytest.raises(CommandError, match="still gets it"):
        redeliver(first, "effects")
    handle_all()
    assert effects() == every
    assert counted("effects") == {"queued": 5, "handled": 5, "retrying": 0, "dead": 0, "discarded": 0}
    assert counted("others")["handled"] == 3
    assert InboxEntry.objects.filter(group="effects").count() == 3

    # Also a second time, after the redelivered entry has passed, and while another group waits for the message.
    Effect.objects.filter(number__in=["effects 1", "others 1"]).delete()
    redeliver(first, "others")
    redeliver(first, "effects")
    handle_all()
    assert effects() == every
    assert counted("effects")["handled"] == 6


@pytest.mark.usefixtures("no_events")
def test_a_message_that_the_group_has_not_passed_is_refused_and_a_discarded_one_is_delivered() -> None:
    mended: list[bool] = []

    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        if not mended:
            raise PermanentError("not yet")
        Effect.objects.create(number=f"effects {delivery.key}")

    consumer_runtime().run_once()
    dead = publish("orders", {}, key="1", at_once=True).message_id
    with pytest.raises(CommandError, match="no queue of this group has it"):
        redeliver(uuid4(), "effects")
    sequence()
    with pytest.raises(CommandError, match="still gets it"):
        redeliver(dead, "effects")
    handle_all()
    with pytest.raises(CommandError, match="outbox_dead_letter replay"):
        redeliver(dead, "effects")
    call_command("outbox_dead_letter", "discard", "effects", str(dead), "--no-input", stdout=StringIO())
    mended.append(True)
    redeliver(dead, "effects")
    assert counted("effects") == {"queued": 2, "handled": 0, "retrying": 1, "dead": 0, "discarded": 1}
    handle_all()
    assert effects() == ["effects 1"]
    assert counted("effects") == {"queued": 2, "handled": 1, "retrying": 0, "dead": 0, "discarded": 1}


@pytest.mark.usefixtures("no_events")
@pytest.mark.skipif(not has("console"), reason="a part that is not there")
def test_the_page_of_a_message_offers_it_for_the_groups_that_have_passed_it() -> None:
    subscribe("effects")
    one = publish("orders", {}, key="1", at_once=True).message_id
    address = reverse("outbox:message", args=[one])
    client = client_of(make_user(*ALL))
    sequence()
    assert b"Deliver again to" not in client.get(address).content
    handle_all()
    assert b"Deliver again to effects" in client.get(address).content


@pytest.mark.usefixtures("no_events")
def test_a_transaction_of_several_messages_is_decided_by_the_id_of_any_of_them() -> None:
    def undecided() -> list[UUID]:
        stored: list[Message] = [message("orders", {}, key=key) for key in "12"]
        with transaction.atomic():
            publish_messages(stored)
            connections["default"].run_on_commit.clear()
        return [one.message_id for one in stored]

    def outcome() -> list[Any]:
        with broker_connection() as (connection, _):
            rows = connection.execute("SELECT decision::text, cardinality(log_ids) FROM outbox.op_log").fetchall()
            connection.execute("DELETE FROM outbox.op_log")
            connection.execute("DELETE FROM outbox.pending_check")
        return rows

    for number in (0, 1):
        ids = undecided()
        call_command("outbox_transaction", "ask", str(ids[number]), "--dry-run", stdout=StringIO())
        call_command("outbox_transaction", "decide", str(ids[number]), "commit", "--force", "--running",
                     "--no-input", stdout=StringIO())  # fmt: skip
        assert outcome() == [("C", 2)]


# -- destroying: a confirmation first, and a refusal while processes live ---------------------------


@pytest.fixture
def _poison(databases: None, no_subscribers: None) -> None:
    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        if delivery.key.startswith("poison"):
            raise PermanentError(f"cannot ever work: {delivery.key}")

    for key in ("poison 1", "poison 2", "good"):
        publish("orders", {}, key=key, at_once=True)
    consume()


def _keys(*arguments: str) -> list[str]:
    return sorted(item["letter"]["key"] for item in call_json("outbox_dead_letter", "list", *arguments))


@pytest.mark.usefixtures("_poison")
def test_dead_letters_are_discarded_after_a_confirmation(monkeypatch: pytest.MonkeyPatch) -> None:
    discard = ("outbox_dead_letter", "discard", "effects", "--error", "poison 1")
    assert "Discard 1 dead letter of group effects whose error contains poison 1" in call(*discard, "--dry-run")
    assert call_json(*discard, "--dry-run")["before"]["selected"] == 1
    for answer, complaint in (("", "pass --no-input"), ("no\n", "nothing was changed")):
        monkeypatch.setattr(sys, "stdin", StringIO(answer))
        with pytest.raises(CommandError, match=complaint):
            call(*discard)
    assert _keys("effects") == ["poison 1", "poison 2"]
    monkeypatch.setattr(sys, "stdin", StringIO("yes\n"))
    assert "after: settled: 1" in call(*discard)
    assert _keys("effects", "--error-type", "PermanentError") == ["poison 2"]
    assert _keys("effects", "--settled") == ["poison 1", "poison 2"]
    with pytest.raises(CommandError, match=r"0 of the 1 ids .* nothing was discarded"):
        call("outbox_dead_letter", "discard", "effects", str(uuid4()), "--no-input")
    assert call_json("outbox_dead_letter", "discard", "effects", "--all", "--no-input")["after"] == {"settled": 1}
    assert _keys("effects") == []
    assert ended("outbox_status")[0], "no leader ticks"
    assert "handled" in call("outbox_group", "offsets", "effects")


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize(
    "selection", [[], ["--all", "--error", "x"], ["--since", "yesterday"], ["--since", "2026-01-01T00:00:00"]]
)
def test_the_arguments_of_discard_are_checked(selection: list[str]) -> None:
    with pytest.raises(CommandError, match=r"--all|write it like|time zone"):
        call("outbox_dead_letter", "discard", "effects", "--no-input", *selection)


def _offsets() -> list[int]:
    return [queue["next_offset"] for queue in call_json("outbox_group", "offsets", "effects")]


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--to-latest"], r"^Move group effects on topic orders .* The group skips 2 messages"),
        (["--to-earliest", "--reprocess"], "and handles them again even if they are in its inbox"),
    ],
)
def test_a_reset_that_skips_or_repeats_asks_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], complaint: str
) -> None:
    for key in ("later 1", "later 2"):
        publish("orders", {}, key=key, at_once=True)
    sequence()
    reset = ("outbox_group", "reset", "effects", "orders", *options)
    before = _offsets()
    for answer in ("", "no\n"):
        monkeypatch.setattr(sys, "stdin", StringIO(answer))
        with pytest.raises(CommandError, match=r"pass --no-input|nothing was changed"):
            call(*reset)
        assert re.search(complaint, capsys.readouterr().out)
    call(*reset, "--dry-run")
    assert _offsets() == before
    monkeypatch.setattr(sys, "stdin", StringIO("yes\n"))
    call(*reset)
    assert _offsets() != before


@pytest.mark.usefixtures("_poison")
def test_a_reset_to_before_needs_no_confirmation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO(""))
    assert "Done." in call("outbox_group", "reset", "effects", "orders", "--to-earliest")


@pytest.mark.usefixtures("_poison")
def test_deciding_past_the_ledger_asks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with transaction.atomic():
        receipt = publish("orders", {}, key="running")
        decide = ["outbox_transaction", "decide", str(receipt.transaction_id), "rollback"]
        for complaint, option in (("still running", "--force"), ("may still run", "--running")):
            with pytest.raises(CommandError, match=complaint):
                call(*decide)
            decide.append(option)
        monkeypatch.setattr(sys, "stdin", StringIO("no\n"))
        with pytest.raises(CommandError, match="nothing was changed"):
            call(*decide)
        assert decisions()["running"] is None
        monkeypatch.setattr(sys, "stdin", StringIO("yes\n"))
        assert "applied" in call(*decide)
    assert decisions()["running"] == "R"


@pytest.mark.usefixtures("_poison")
def test_a_group_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = call_json("outbox_group", "delete", "effects", "--dry-run")
    loss = {"group": "effects", "topic": "orders", "lag": 0, "retrying": 0, "dead": 2}
    assert planned["before"] == {"losses": [loss]}
    monkeypatch.setattr(sys, "stdin", StringIO(""))
    with pytest.raises(CommandError, match="0 messages not consumed, 0 that are retried, 2 dead letters"):
        call("outbox_group", "delete", "effects")
    with pytest.raises(CommandError, match="no subscription to 'payments'; it has: orders"):
        call("outbox_group", "delete", "effects", "--topic", "payments", "--no-input")
    assert "Done." in call("outbox_group", "delete", "effects", "--no-input")
    with pytest.raises(CommandError, match="'effects' is not known"):
        call("outbox_group", "delete", "effects", "--no-input")
