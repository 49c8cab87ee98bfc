"""Every declared action, by its command and by the page: the same effect, and the same entry in the audit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.core.management import call_command, load_command_class
from django.core.management.base import CommandError
from django.db import transaction

from outbox.broker.groups import lives
from outbox.broker.groups.registration import register
from outbox.broker.log.topics import list_topics
from outbox.broker.operations import comparisons
from outbox.broker.operations.comparisons import ComparisonKind, DatabaseComparison
from outbox.broker.operations.progress import list_queues
from outbox.broker.transaction import checks
from outbox.contrib.django import publish
from outbox.contrib.django.actions import audit
from outbox.contrib.django.actions.declaration import DeclaredAction, FieldKind
from outbox.contrib.django.catalogue import ACTIONS, LISTINGS, of_command
from outbox.contrib.django.engine.broker import flush, reset_broker
from outbox.contrib.django.models import OperatorAction
from outbox.contrib.django.settings.conf import get_settings
from outbox.subscription import Mode, Subscription
from tests.django.broker_world import World, away, new_world
from tests.django.conftest import BROKER_TEMPLATE, point_alias
from tests.django.operators import ALL, bury, client_of, make_user
from tests.django.shop.models import Order
from tests.django.state import renamed
from tests.django.support import sequence
from tests.part_apps import app_of, command_files, has

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers", "no_events")

Given = Mapping[str, str | list[str]]
Case = tuple[Callable[[World], Given], Callable[[World], Any]]
CASES: dict[str, Case] = {}
SOME_ID = UUID(int=7)


def case(name: str, effect: Callable[[World], Any]) -> Callable[[Callable[[World], Given]], None]:
    """How the state for an action is made, with the values to give; and the effect to compare.

    A tree without a part has none of its actions.
    """

    def register(arrange: Callable[[World], Given]) -> None:
        if name in ACTIONS:
            CASES[name] = (arrange, effect)

    return register


def rows(statement: str) -> Callable[[World], Any]:
    return lambda world: world.sql(statement)


DECISIONS = rows("SELECT decision::text, decided_by::text FROM outbox.op_log")
DUE = rows("SELECT due_at <= now() FROM outbox.pending_check")
REJECTING = rows("SELECT reject_transactional FROM outbox.broker")
LETTERS = rows("SELECT replayed_at IS NOT NULL, discarded_at IS NOT NULL FROM outbox.dead_letter ORDER BY log_id")
GROUPS = rows("SELECT name, paused FROM outbox.consumer_group ORDER BY name")


def topics(world: World) -> list[tuple[str, int]]:
    return sorted((one.name, one.queue_count) for one in list_topics(world.run) if one.name in ("orders", "new"))


def undecided(world: World) -> UUID:
    """A committed transaction without an end message. Its check is due in an hour."""
    with transaction.atomic():
        Order.objects.get_or_create(number="7")
        receipt = publish("orders", {}, key="7")
    flush(within_seconds=5)
    world.sql("DELETE FROM outbox.op_log")
    checks.scan(world.run, settings=get_settings().check)
    world.sql("UPDATE outbox.pending_check SET immune_until = now(), due_at = now() + interval '1 hour'")
    return receipt.transaction_id


@case("decide", DECISIONS)
def _decide(world: World) -> Given:
    return {"id": str(undecided(world)), "decision": "commit"}


@case("ask", DUE)
def _ask(world: World) -> Given:
    return {"ids": [str(undecided(world))]}


@case("reject", REJECTING)
def _reject(world: World) -> Given:
    return {}


@case("accept", REJECTING)
def _accept(world: World) -> Given:
    world.sql("UPDATE outbox.broker SET reject_transactional = true")
    return {}


def letters(world: World) -> list[str]:
    world.subscribe("mail")
    world.publish(2)
    for number in range(2):
        bury(world, "mail", f"k{number}", "TimeoutError: no answer")
    return [str(one) for (one,) in world.sql("SELECT message_id FROM outbox.commit_log ORDER BY log_id")]


@case("replay", LETTERS)
def _replay(world: World) -> Given:
    return {"group": "mail", "ids": letters(world)[:1]}


@case("discard", LETTERS)
def _discard(world: World) -> Given:
    letters(world)
    return {"group": "mail", "error_type": "TimeoutError"}


@case("recall", rows("SELECT count(*) FROM outbox.scheduled"))
def _recall(world: World) -> Given:
    receipt = publish("reminders", {}, key="later", delay=3600, at_once=True)
    sequence()
    return {"ids": [str(receipt.message_id)]}


@case("redeliver", rows("SELECT count(*) FROM outbox.scheduled"))
def _redeliver(world: World) -> Given:
    world.subscribe("mail")
    world.publish()
    call_command("outbox_group", "reset", "mail", "orders", "--to-latest", "--no-input", stdout=StringIO())
    OperatorAction.objects.all().delete()
    [(message_id,)] = world.sql("SELECT message_id FROM outbox.commit_log")
    return {"id": str(message_id), "group": "mail"}


@case("pause", GROUPS)
def _pause(world: World) -> Given:
    world.subscribe("mail")
    return {"group": "mail"}


@case("resume", GROUPS)
def _resume(world: World) -> Given:
    world.subscribe("mail")
    world.sql("UPDATE outbox.consumer_group SET paused = true")
    return {"group": "mail"}


@case("skip", lambda world: sorted(queue.next_offset for queue in list_queues(world.run, "mail")))
def _skip(world: World) -> Given:
    register(world.run, Subscription(topic="orders", group="mail", mode=Mode.ORDERLY))
    receipt = publish("orders", {}, key="k1", at_once=True)
    sequence()
    world.sql(
        "INSERT INTO outbox.failure (group_id, log_id, attempt, error) SELECT group_id, log_id, 0, 'ValueError: no'"
        " FROM outbox.consumer_group, outbox.commit_log"
    )
    return {"group": "mail", "topic": "orders", "id": str(receipt.message_id)}


@case("reset", lambda world: sorted(queue.lag for queue in list_queues(world.run, "mail")))
def _reset(world: World) -> Given:
    world.subscribe("mail")
    world.publish(4)
    return {"group": "mail", "topic": "orders", "to_latest": "yes"}


@case("delete_group", GROUPS)
def _delete_group(world: World) -> Given:
    world.subscribe("mail")
    return {"group": "mail"}


@case("delete_topic", topics)
def _delete_topic(world: World) -> Given:
    return {"name": "orders"}


@case("drop_broker", rows("SELECT to_regclass('outbox.commit_log') IS NULL"))
def _drop(world: World) -> Given:
    publish("orders", {}, key="lost", at_once=True)
    return {"force": "yes"}


@case("settle", rows("SELECT missing FROM outbox.comparison"))
def _settle(world: World) -> Given:
    life = lives.current(world.run)
    producers = get_settings().required_producer_group()
    comparisons.store(
        world.run,
        DatabaseComparison(
            kind=ComparisonKind.LEDGER, subject=producers, alias="default", life_id=life, missing=3
        ),
    )  # fmt: skip
    return {}


@case("forget", rows("SELECT count(*) FROM outbox.periodic_pass"))
def _forget(world: World) -> Given:
    world.sql("INSERT INTO outbox.periodic_pass (producer_group, name, interval_seconds, began_at)"
              " VALUES ('shop', 'receive:partner', 60, now())")  # fmt: skip
    return {"receivers": ["partner"]}


@case("forget_producer_group", rows("SELECT producer_group FROM outbox.periodic_pass ORDER BY 1"))
def _forget_producer_group(world: World) -> Given:
    world.sql("INSERT INTO outbox.periodic_pass (producer_group, name, interval_seconds, began_at)"
              " VALUES ('old', 'prune', 30, now() - interval '1 hour'), ('shop', 'prune', 30, now())")  # fmt: skip
    return {"group": "old"}


@case("erase", rows("SELECT content_type, body FROM outbox.commit_log"))
def _erase(world: World) -> Given:
    message_id = publish("orders", {"name": "Anna"}, key="17", at_once=True).message_id
    sequence()
    return {"topic": "orders", "message": [str(message_id)]}


# The cases of parts that this tree has.
for path in sorted(Path(__file__).parent.glob("cases_of_*.py")):
    import_module(f"tests.django.{path.stem}")


# -- the two doors --------------------------------------------------------------------------------------


def arguments(action: DeclaredAction, given: Given) -> list[str]:
    """The command line."""
    command, _, word = action.command.partition(" ")
    line = [command] if word in {"", *(f"--{name}" for name in given)} else [command, word]
    for field in action.fields:
        value = given.get(field.name, [])
        for one in value if isinstance(value, list) else [value]:
            option = f"--{field.name.replace('_', '-')}"
            line += [one] if field.positional else [option] if field.kind is FieldKind.FLAG else [option, one]
    return [*line, "--no-input", "--reason", "a test"]


def by_command(action: DeclaredAction, given: Given) -> None:
    call_command(*arguments(action, given), stdout=StringIO())


def by_page(action: DeclaredAction, given: Given) -> None:
    address = f"/outbox/act/{action.name.replace('_', '-')}/"
    client = client_of(make_user(*ALL))
    shown = client.post(address, dict(given))
    assert shown.status_code == 200, shown.content.decode()
    answer = client.post(address, {**given, "confirmed": "yes", "why": "a test"})
    assert answer.status_code == 302, answer.content.decode()


def entry() -> dict[str, Any]:
    """The only entry of the audit, without what differs between two worlds."""
    found = OperatorAction.objects.get()
    assert found.ended_at is not None and found.ended_at >= found.at
    names = ("why", "action", "subject", "effect", "before", "after", "outcome")
    text = json.dumps({name: getattr(found, name) for name in names})
    text = re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}", "ID", text)
    written: dict[str, Any] = json.loads(re.sub(r"\d{4}-\d\d-\d\d[T ][\d:.]+(\+[\d:]+|Z)", "TIME", text))
    return written


@pytest.mark.parametrize("name", ACTIONS)
def test_an_action_does_and_records_the_same_by_command_and_by_page(
    name: str, outbox_settings: Callable[..., None], new_database: Callable[..., str]
) -> None:
    action, (arrange, effect) = ACTIONS[name], CASES[name]
    found = []
    for door in (by_command, by_page) if action.permission and has("console") else (by_command,):
        if door is by_page:
            point_alias("broker", new_database(template=BROKER_TEMPLATE))
            reset_broker()
        with new_world(outbox_settings) as world:
            if name == "drop_broker":
                world.sql("UPDATE outbox.leader_lease SET owner = NULL")
            given = arrange(world)
            before = effect(world)
            if door is by_command:
                call_command(*arguments(action, given), "--dry-run", stdout=StringIO())
            assert effect(world) == before and not OperatorAction.objects.exists(), "a plan changes nothing"
            door(action, given)
            assert effect(world) != before
            found.append((effect(world), entry()))
        who = OperatorAction.objects.get().who
        assert who.endswith("(command)") is (door is by_command)
        OperatorAction.objects.all().delete()
    assert found[0][1]["outcome"] == "done" and found[0][1]["why"] == "a test"
    assert found[1:] in ([], found[:1])


# Each of them is what a process does by itself, or stores what a run of Spark found.
NOT_BY_OPERATORS = {"outbox_audit compare", "outbox_contract write"}
READS = {
    "outbox_message show",
    "outbox_contract check",
    "outbox_contract show",
    *(one.command for one in LISTINGS.values()),
}


def test_every_subcommand_that_changes_something_is_a_declared_action() -> None:
    for name in (path.stem for path in command_files()):
        parser = load_command_class(app_of(name), name).create_parser("manage.py", name)
        every = {f"{name} {word}" for one in parser._actions if one.dest == "action" for word in one.choices or ()}
        declared = {action.command for action in of_command(name)}
        assert every - declared == every & (READS | NOT_BY_OPERATORS), name


# -- failures, and an application's database that is away --------------------------------------------------


def test_a_refused_action_changes_nothing_and_a_command_records_it(outbox_settings: Callable[..., None]) -> None:
    """The page does not try what its plan refuses."""
    with new_world(outbox_settings) as world:
        given = {"id": str(undecided(world)), "decision": "rollback"}
        with pytest.raises(CommandError, match="not what the ledger proves"):
            by_command(ACTIONS["decide"], given)
        confirmed = {**given, "confirmed": "yes", "why": "a test"}
        if has("console"):
            answer = client_of(make_user(*ALL)).post("/outbox/act/decide/", confirmed)
            assert answer.status_code == 422 and b"It is refused now" in answer.content
        entry = OperatorAction.objects.get()
        assert entry.outcome == "failed" and "not what the ledger proves" in entry.after["error"]
        assert DECISIONS(world) == []


def test_without_the_table_nothing_is_done(outbox_settings: Callable[..., None]) -> None:
    with new_world(outbox_settings) as world:
        with (
            renamed("outbox_operator_action"),
            pytest.raises(CommandError, match=r"nothing was done.*run `manage.py migrate`"),
        ):
            call_command("outbox_transaction", "reject")
        assert REJECTING(world) == [(False,)]


def test_while_the_application_is_down_the_log_keeps_the_entry(
    outbox_settings: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    with new_world(outbox_settings) as world:
        with away("default"):
            call_command("outbox_transaction", "reject", "--reason", "the disk is full", stdout=StringIO())
        assert REJECTING(world) == [(True,)]
    assert not OperatorAction.objects.exists()
    said = [record.getMessage() for record in caplog.records if record.name == audit.__name__]
    begun, done = (json.loads(text.partition("The entry is: ")[2]) for text in said)
    assert (begun["outcome"], done["outcome"], done["after"]) == ("begun", "done", {"rejecting": True})
    assert done["why"] == "the disk is full" and done["who"].endswith("(command)")


def test_while_the_application_is_down_only_a_forced_decision_is_made(outbox_settings: Callable[..., None]) -> None:
    """The ledger proves nothing."""
    with new_world(outbox_settings) as world:
        given = {"id": str(undecided(world)), "decision": "commit"}
        with away("default"):
            with pytest.raises(CommandError, match="not what the ledger proves"):
                by_command(ACTIONS["decide"], given)
            assert DECISIONS(world) == []
            by_command(ACTIONS["decide"], {**given, "force": "yes"})
        assert DECISIONS(world) == [("C", "O")]
