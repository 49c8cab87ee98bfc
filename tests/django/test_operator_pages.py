"""The commands and the SQL of docs/operations/ run as they are written, each on a broker with what they are about."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO

import pytest
from django.core.management import CommandError, call_command, load_command_class

from outbox.broker.groups.registration import register
from outbox.contrib.django import publish
from outbox.contrib.django.engine.broker import flush
from outbox.contrib.django.models import OperatorAction
from outbox.subscription import Subscription
from tests.django.broker_world import World, new_world
from tests.django.operators import bury
from tests.django.state import execute, rolled_back
from tests.django.support import sequence
from tests.django.test_actions import CASES
from tests.documents import DOCS, FOR_OPERATORS, Command, blocks, commands
from tests.part_apps import app_of, has

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("databases", "no_subscribers")]

# These end, and do not destroy what another test needs.
RUN = ("audit", "dead_letter", "doctor", "group", "message", "process", "status", "topic", "transaction")
WITH_EXIT_CODE = ("outbox_audit", "outbox_doctor", "outbox_status")
EVERY = {one.words: one for page in FOR_OPERATORS for one in commands(page)}.values()
EXECUTED = sorted((str(one), one) for one in EVERY if one.words[0].removeprefix("outbox_") in RUN)
# The SQL of the page about roles is that of `outbox_install --grants`; test_roles.py runs the command and compares it.
SQL = [(page.stem, code) for page in FOR_OPERATORS if page.stem != "roles" for code in blocks(page, "sql")]


def letters(world: World) -> str:
    """Two dead letters of the group `billing`; returns the id of a message."""
    options = []
    if has("limits"):
        from outbox.contrib.limits import Limits

        options = [Limits(running=20)]
    register(world.run, Subscription(topic="orders", group="billing", options=options))
    world.publish(2)
    bury(world, "billing", "k0", "TimeoutError: no answer")
    bury(world, "billing", "k1", "ValueError: no such order")
    return str(world.sql("SELECT message_id FROM outbox.commit_log ORDER BY log_id")[0][0])


def delayed(world: World) -> str:
    receipt = publish("reminders", {}, key="4711", delay=3600, at_once=True)
    sequence()
    return str(receipt.message_id)


def abandoned() -> str:
    """An undecided transaction that has rolled back."""
    with rolled_back():
        receipt = publish("orders", {}, key="7")
    flush(within_seconds=5)
    return str(receipt.transaction_id)


def subject(world: World, given: Command) -> str:
    """What the command is about; returns the id that the reader fills in."""
    name, word = (*given.words, "", "")[:2]
    if name == "outbox_transaction":
        return abandoned() if "rollback" in given.words else str(CASES["decide"][0](world)["id"])
    if name == "outbox_message" and word == "recall":
        return delayed(world)
    if (name, word) in (("outbox_group", "skip"), ("outbox_message", "redeliver")):
        return str(CASES[word][0](world)["id"])
    if word == "settle":
        CASES["settle"][0](world)
    return letters(world)


@pytest.mark.parametrize("given", [one for _, one in EXECUTED], ids=[name for name, _ in EXECUTED])
def test_a_command_of_a_page(given: Command, outbox_settings: Callable[..., None]) -> None:
    with new_world(outbox_settings) as world:
        found = subject(world, given)
        name, *words = (found if word == "ID" else word for word in given.words)
        words += ["--no-input"] * accepts_no_input(name, words)
        out = StringIO()
        assert exit_code(name, words, out) in ((0, 1, 2) if name in WITH_EXIT_CODE else (0,)), out.getvalue()
        assert out.getvalue()
    OperatorAction.objects.all().delete()


def exit_code(name: str, words: list[str], out: StringIO) -> object:
    try:
        call_command(name, *words, stdout=out)
    except SystemExit as ended:
        return ended.code
    return 0


def accepts_no_input(name: str, words: list[str]) -> bool:
    parser = load_command_class(app_of(name), name).create_parser("manage.py", name)
    try:
        parser.parse_args([*words, "--no-input"])
    except (SystemExit, CommandError):
        return False
    return True


@pytest.mark.parametrize(("page", "code"), SQL, ids=[page for page, _ in SQL])
def test_the_sql_of_a_page(page: str, code: str, outbox_settings: Callable[..., None]) -> None:
    with new_world(outbox_settings) as world:
        for statement in filter(str.strip, code.split(";\n")):
            # The tables outbox_… and shop_… are the application's, those of the schema outbox the broker's.
            if "outbox_" in statement or "shop_" in statement:
                execute(statement)
            else:
                world.sql(statement)


def test_there_are_commands_on_the_pages() -> None:
    assert len(EXECUTED) > 40 and len(SQL) >= 3
    assert (DOCS / "operations" / "index.md") in FOR_OPERATORS
