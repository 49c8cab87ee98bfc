"""Dead letters that operators edit: one effect, the content before, refusals, two operators, kills."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from io import StringIO
from typing import Any, ClassVar
from uuid import UUID

import psycopg
import pytest
from django.core.management import CommandError, call_command
from django.db import connections

from outbox import Delivery
from outbox.broker.database.executor import Executor
from outbox.broker.groups.registration import register
from outbox.broker.operations.dead_letters import LetterSelection, replay
from outbox.broker.schema import grants
from outbox.contrib.django import publish, subscriber
from outbox.contrib.django.catalogue import ACTIONS
from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.django.engine.broker import get_codecs, reset_broker
from outbox.contrib.django.models import OperatorAction
from outbox.contrib.django.worker.drain import drain, drain_after_others
from outbox.contrib.editing import letters
from outbox.contrib.editing.letters import edit, edited, merged
from outbox.errors import UndecodableBody, UsageError
from outbox.subscription import OnError, Subscription, SubscriptionOption
from tests.django.operators import ALL, client_of, make_user
from tests.django.sessions import broker_connection
from tests.django.shop.models import Effect
from tests.django.state import effects
from tests.django.support import broker_sql, call, call_json, differences
from tests.part_apps import has
from tests.support import eventually, killed

GROUP = "billing"
ERRORS: dict[type[BaseException], OnError | str] = {KeyError: OnError.DEAD_LETTER, TypeError: OnError.DEAD_LETTER}

pytestmark = pytest.mark.usefixtures("no_subscribers")


@pytest.fixture(autouse=True)
def audit() -> Iterator[None]:
    yield
    OperatorAction.objects.all().delete()


class Amounts(SubscriptionOption):
    """The type of a handler: the amount is a whole number."""

    reads: ClassVar[bool] = True

    def read(self, topic: str, headers: Any, body: Any) -> Any:
        if not isinstance(body["amount"], int):
            raise UndecodableBody(f"{body['amount']!r} is no amount")
        return body


def subscribe(topic: str = "orders", group: str = GROUP, **options: Any) -> None:
    """A handler whose effect is the amount and the tenant of the message."""

    @subscriber(topic, group=group, start="earliest", on_error=ERRORS, **options)
    def bill(delivery: Delivery) -> None:
        Effect.objects.create(number=f"{delivery.body['amount']} {delivery.headers.get('tenant', '-')}")


def bury(*bodies: Any, topic: str = "orders", key: str = "k", headers: dict[str, str] | None = None) -> list[UUID]:
    """Publish messages that the handler gives up."""
    ids = [publish(topic, body, key=key, headers=headers, at_once=True).message_id for body in bodies]
    drain()
    return ids


def run(verb: str, *arguments: str) -> str:
    return call("outbox_dead_letter", verb, *arguments, "--no-input")


def run_edit(*arguments: str) -> str:
    return run("edit", GROUP, *arguments)


def originals() -> list[Any]:
    return [one["body"] for one in call_json("outbox_dead_letter", "edited", GROUP)]


def dead() -> list[UUID]:
    return [one for (one,) in broker_sql(
        "SELECT message_id FROM outbox.dead_letter JOIN outbox.commit_log USING (log_id)"
        " WHERE replayed_at IS NULL ORDER BY log_id"
    )]  # fmt: skip


def body_of(message_id: UUID) -> bytes:
    [[body]] = broker_sql("SELECT body FROM outbox.commit_log WHERE message_id = %s", message_id)
    assert isinstance(body, bytes)
    return body


# -- editing ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("databases")
def test_an_edited_letter_is_handled_once_with_the_new_content() -> None:
    subscribe()
    [one] = bury({"amont": 5, "note": "x"}, headers={"colour": "red"})
    assert dead() == [one]
    patch = '{"amount": 7, "amont": null}'
    run_edit(str(one), "--patch", patch, "--headers", '{"tenant": "a", "colour": null}', "--reason", "a typo")
    assert (dead(), json.loads(body_of(one))) == ([one], {"amount": 7, "note": "x"})
    drain()
    assert effects() == [], "it stays a dead letter until it is replayed"
    run("replay", GROUP, str(one))
    drain()
    drain()
    assert (effects(), dead(), differences()) == (["7 a"], [], [])
    assert originals() == [{"amont": 5, "note": "x"}]
    entry = OperatorAction.objects.get(action="edit")
    assert (entry.why, entry.outcome, entry.subject) == ("a typo", "done", f"messages {one}")
    assert "amont" not in json.dumps([entry.before, entry.after, entry.effect]), "the audit has no content"


@pytest.mark.usefixtures("databases")
def test_the_plan_shows_the_difference_and_changes_nothing(outbox_settings: Callable[..., None]) -> None:
    subscribe()
    [one] = bury({"amont": 5, "iban": "DE12", "at": {"city": "Rome", "zip": 1}})
    body = body_of(one)
    patch = '{"amount": 7, "amont": null, "at": {"zip": 2}, "iban": "DE13"}'
    shown = run_edit("--all", "--patch", patch, "--dry-run")
    for difference in ("body.amount: nothing → 7", "body.amont: 5 → nothing", "body.at.zip: 1 → 2", "DE12"):
        assert difference in shown
    assert "Rome" not in shown, "what stays is not shown"
    outbox_settings(MASKED_FIELDS={"orders": ["iban"]})
    assert "DE12" not in run_edit("--all", "--patch", patch, "--dry-run")
    assert body_of(one) == body
    assert originals() == []
    assert not OperatorAction.objects.exists()


@pytest.mark.usefixtures("databases")
def test_of_many_letters_those_that_cannot_be_edited_are_named_and_left() -> None:
    subscribe()
    good = bury({"amont": 1}, {"amont": 2})
    [text, listed, number, stored, headers] = bury({}, ["amount"], {"x": 1}, {"y": 1}, {"z": 1})
    broker_sql(r"UPDATE outbox.commit_log SET body = '\xff00' WHERE message_id = %s", text)
    exact = b'{"x": 0.12345678901234567890123}'
    broker_sql("UPDATE outbox.commit_log SET body = %s WHERE message_id = %s", exact, number)
    broker_sql(
        "UPDATE outbox.commit_log SET content_type = %s WHERE message_id = %s", "application/vnd.outbox.large", stored
    )
    broker_sql("UPDATE outbox.commit_log SET headers = '[1]' WHERE message_id = %s", headers)
    deep = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    [deepest] = bury({})
    broker_sql("UPDATE outbox.commit_log SET body = %s WHERE message_id = %s", deep, deepest)
    hostile = [text, listed, number, stored, headers, deepest]
    before = [body_of(one) for one in hostile]
    with pytest.raises(CommandError) as caught:
        run_edit("--all", "--patch", '{"amount": 3}', "--replay")
    said = str(caught.value)
    for one, reason in zip(
        hostile,
        ("UndecodableBody", "not an object", "lose digits", "stored elsewhere", "damaged", "UndecodableBody"),
        strict=True,
    ):
        [place] = [part for part in said.split("), ") if str(one) in part]
        assert reason in place
    assert not any(str(one) in said for one in good)
    drain()
    assert (effects(), dead()) == (["3 -", "3 -"], hostile)
    assert [body_of(one) for one in hostile] == before
    # A new body needs nothing of the old one.
    run_edit(str(text), "--body", '{"amount": 4}', "--replay")
    drain()
    assert (effects(), differences()) == (["3 -", "3 -", "4 -"], [])


@pytest.mark.usefixtures("databases")
def test_what_the_handler_could_not_read_is_refused(outbox_settings: Callable[..., None]) -> None:
    subscribe(options=[Amounts()])
    [one] = bury({"amount": "five"})
    for masked in ([], ["amount"]):
        outbox_settings(MASKED_FIELDS={"orders": masked})
        out, command = StringIO(), ["outbox_dead_letter", "edit", GROUP, "--all", "--body", '{"amount": "six"}']
        with pytest.raises(CommandError, match="UndecodableBody"):
            call_command(*command, "--dry-run", stdout=out)
        assert ("six" in out.getvalue()) is not bool(masked)
    outbox_settings(MASKED_FIELDS={})
    with pytest.raises(CommandError, match="UndecodableBody"):
        run_edit(str(one), "--patch", '{"amount": "six"}')
    assert body_of(one) == b'{"amount":"five"}'
    assert "'six' is no amount" not in json.dumps(list(OperatorAction.objects.values("before", "after")))
    for name, value in (("headers", '{"a b": "c"}'), ("headers", '{"a": "\\u0000"}'), ("body", '"\\ud800"')):
        with pytest.raises(CommandError, match="not done"):
            run_edit(str(one), f"--{name}", value)
    assert originals() == []


@pytest.mark.usefixtures("databases")
def test_a_wrong_edit_is_refused_before_anything_is_read() -> None:
    subscribe()
    [one] = bury({})
    for arguments in (
        [],
        ["--patch", "{}", "--body", "{}"],
        ["--patch", "[1]"],
        ["--patch", "{"],
        ["--headers", '"x"'],
        ["--body", "[" * 100_000],
    ):
        with pytest.raises(CommandError, match=r"--(patch|headers|body)"):
            run_edit(str(one), *arguments)
    with pytest.raises(CommandError, match="nothing was edited"):
        run_edit(str(UUID(int=1)), "--patch", "{}")
    run("discard", GROUP, str(one))
    with pytest.raises(CommandError, match="nothing was edited"):
        run_edit(str(one), "--patch", '{"amount": 1}')


@pytest.mark.usefixtures("databases")
def test_the_plan_names_other_groups_that_get_the_new_content() -> None:
    subscribe()
    [one] = bury({})
    subscription = Subscription(topic="orders", group="mail")
    with broker_connection() as (connection, schema):
        register(Executor(connection, schema), subscription)
    patch = [str(one), "--patch", '{"amount": 1}', "--dry-run"]
    assert "these groups, too, get the new one: mail." in run_edit(*patch)
    broker_sql("UPDATE outbox.consumer_group SET broadcast = true WHERE name = 'mail'")
    assert "these groups" not in run_edit(*patch)
    broker_sql("UPDATE outbox.consumer_group SET broadcast = false WHERE name = 'mail'")
    subscribe(group="mail")
    drain()
    assert len(dead()) == 2
    assert "get the new one: mail." in run_edit(*patch), "it is a dead letter of the other group, too"
    run("discard", "mail", str(one))
    assert "these groups" not in run_edit(*patch)


@pytest.mark.usefixtures("databases")
def test_the_content_before_goes_with_the_dead_letter() -> None:
    subscribe()
    bury({})
    run_edit("--all", "--patch", '{"a": 1}')
    run_edit("--all", "--patch", '{"a": 2}')
    assert originals() == [{"a": 1}, {}]
    broker_sql("DELETE FROM outbox.consumer")
    call_command("outbox_group", "delete", GROUP, no_input=True, stdout=StringIO())
    assert broker_sql("SELECT count(*) FROM outbox.edited_letter") == [(0,)]


@pytest.mark.skipif(not has("blocked_keys"), reason="this tree lacks the part blocked_keys")
@pytest.mark.usefixtures("databases")
def test_an_edited_letter_keeps_the_order_of_its_key() -> None:
    from outbox.contrib.blocked_keys import BlockKey
    from outbox.contrib.blocked_keys.releasing import run_once

    subscribe("steps", mode="key_ordered", options=[BlockKey()])
    first, second = bury({}, {"amount": 2}, topic="steps")
    assert dead() == [first, second]
    run_edit(str(first), "--patch", '{"amount": 1}', "--replay")
    for _ in range(3):
        drain()
        with broker_connection() as (connection, schema):
            run_once(Executor(connection, schema))
    assert list(Effect.objects.order_by("pk").values_list("number", flat=True)) == ["1 -", "2 -"]
    assert (dead(), differences()) == ([], [])


# -- two at once -----------------------------------------------------------------------------------


def planned(**values: Any) -> Any:
    """The plan of an edit of all letters."""
    empty = {field.name: [] if field.many else field.default for field in ACTIONS["edit"].fields}
    return ACTIONS["edit"].plan({**empty, "group": GROUP, "all": True, "replay": False, **values})


@pytest.mark.usefixtures("databases")
@pytest.mark.parametrize("verb", ["edit", "replay", "discard"])
def test_a_letter_that_changed_after_the_plan_is_not_edited(verb: str) -> None:
    subscribe()
    [one, two] = bury({}, {})
    plan = planned(patch='{"amount": 1}')
    run(verb, GROUP, str(one), *(["--patch", '{"amount": 2}'] if verb == "edit" else []))
    with pytest.raises(UsageError, match="have changed since this plan"):
        plan.do()
    assert body_of(two) == b"{}"
    with pytest.raises(CommandError, match="have changed since this plan"):
        run_edit("--all", "--patch", '{"amount": 1}', "--digest", plan.pinned["digest"])
    planned(patch='{"amount": 1}').do()
    assert body_of(two) == b'{"amount":1}'


def wait_for_the_edit(other: Callable[[Executor], object]) -> None:
    """Begin an edit of all letters, let another session wait for it, and commit."""

    def changed(letter: letters.Letter) -> Any:
        return edited(letter, get_codecs(), patch={"amount": "Anna"})

    done: list[object] = []

    def work() -> None:
        with psycopg.connect(alias_conninfo("broker"), autocommit=True) as own, own.transaction():
            done.append(other(Executor(own, "outbox")))

    thread = threading.Thread(target=work)
    with psycopg.connect(alias_conninfo("broker"), autocommit=True) as watching, broker_connection() as (connection, _):
        with connection.transaction():
            edit(Executor(connection, "outbox"), GROUP, LetterSelection(), changed, masked=lambda topic: (), limit=10)
            thread.start()
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            eventually(lambda: watching.execute(waiting).fetchone() == (1,), within_seconds=30, what="waiting")
            assert done == []
    thread.join(30)
    assert len(done) == 1


@pytest.mark.usefixtures("databases")
def test_a_replay_waits_for_the_edit() -> None:
    subscribe()
    bury({})
    wait_for_the_edit(lambda run: replay(run, GROUP))
    drain()
    assert (effects(), differences()) == (["Anna -"], [])


@pytest.mark.skipif(not has("erasure"), reason="this tree lacks the part erasure")
@pytest.mark.usefixtures("databases")
def test_an_erasure_also_erases_the_content_before_an_edit_that_it_meets() -> None:
    from outbox.contrib.erasure.broker_rows import erase, find_keys

    subscribe()
    [one] = bury({"amont": "Anna"})
    wait_for_the_edit(lambda run: erase(run, "orders", find_keys(run, "orders", ["k"])))
    assert body_of(one) == b""
    assert broker_sql("SELECT body, content_type FROM outbox.edited_letter") == [(b"", "application/vnd.outbox.erased")]
    with pytest.raises(CommandError, match="erased"):
        run_edit("--all", "--body", "{}")
    assert differences() == []


# -- rights ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("databases")
def test_the_role_work_edits_and_the_role_watch_only_reads() -> None:
    subscribe()
    one = LetterSelection(message_ids=bury({}))

    def changed(letter: letters.Letter) -> Any:
        return edited(letter, get_codecs(), patch={"amount": 1})

    # The roles of the server go with the transaction.
    with psycopg.connect(alias_conninfo("broker")) as connection, connection.transaction(force_rollback=True):
        executor = Executor(connection, "outbox")
        for statement in grants.plan(executor, grants.Logins({})):
            connection.execute(statement.encode())
        connection.execute("SET LOCAL ROLE outbox_work")
        assert edit(executor, GROUP, one, changed, masked=lambda topic: (), limit=1).changed
        connection.execute("SET LOCAL ROLE outbox_watch")
        assert connection.execute("SELECT body FROM outbox.edited_letter").fetchall() == [(b"{}",)]
        with pytest.raises(psycopg.errors.InsufficientPrivilege), connection.transaction():
            edit(executor, GROUP, one, changed, masked=lambda topic: (), limit=1)
        connection.execute("SET LOCAL ROLE outbox_publish")
        with pytest.raises(psycopg.errors.InsufficientPrivilege), connection.transaction():
            connection.execute("SELECT body FROM outbox.edited_letter")


# -- the page --------------------------------------------------------------------------------------


@pytest.mark.skipif(not has("console"), reason="this tree lacks the part console")
@pytest.mark.usefixtures("databases")
def test_the_page_asks_for_both_permissions_and_confirms_the_plan_that_it_showed() -> None:
    subscribe()
    [one] = bury({"amont": "<b>Anna"})
    given = {"group": GROUP, "all": "yes", "patch": '{"amount": 3}', "replay": "yes"}
    reader, operator, full = (client_of(make_user(*some)) for some in (ALL[:1], ALL[:2], ALL))
    assert [one.post("/outbox/act/edit/", given).status_code for one in (reader, operator)] == [403, 403]
    pages = [one.get("/outbox/dead-letters/edited/").content.decode() for one in (reader, operator, full)]
    assert ["act/edit/" in page for page in pages] == [False, False, True]
    shown = full.post("/outbox/act/edit/", given).content.decode()
    assert "body.amount: nothing → 3" in shown
    digest = shown.partition('name="digest" value="')[2].partition('"')[0]
    run_edit(str(one), "--patch", '{"amount": 4}')
    confirmed = {**given, "digest": digest, "confirmed": "yes", "why": "a typo"}
    assert full.post("/outbox/act/edit/", confirmed).status_code == 400
    assert json.loads(body_of(one))["amount"] == 4
    assert full.post("/outbox/act/edit/", {**confirmed, "digest": ""}).status_code == 302
    drain()
    assert effects() == ["3 -"]
    page = full.get("/outbox/dead-letters/edited/").content.decode()
    assert page.count(str(one)) >= 2
    assert "Anna" not in page


# -- kills -----------------------------------------------------------------------------------------


def killed_at(visit: str, work: Callable[[], object]) -> bool:
    """Whether a process that does this work was killed at a visit of a fault point, such as `name@2`."""
    name, at, number = visit.partition("@")
    # The child opens sessions of its own.
    reset_broker()
    connections.close_all()
    return killed(work, f"{name}=kill{at}{number}")


@pytest.mark.usefixtures("databases")
@pytest.mark.parametrize("visit", ["editing.after_original@4", "editing.after_change@4", "editing.after_commit"])
def test_an_edit_that_is_killed_is_done_or_not(visit: str) -> None:
    subscribe()
    ids = bury({}, {})

    def work() -> None:
        run_edit("--all", "--patch", '{"amount": 1}', "--replay")

    # The plan passes the points in the transaction, too: twice, for two letters.
    assert killed_at(visit, work)
    assert dead() == ([] if visit == "editing.after_commit" else ids)
    assert originals() == ([{}, {}] if visit == "editing.after_commit" else [])
    work()
    drain_after_others()
    assert (effects(), originals(), dead(), differences()) == (["1 -", "1 -"], [{}, {}], [], [])


# -- JSON merge patches (the examples of RFC 7386) -------------------------------------------------


def test_a_patch_is_applied_as_the_standard_says() -> None:
    for value, patch, result in (
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ):
        assert merged(value, patch) == result
