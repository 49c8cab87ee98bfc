"""Every command, page and metric works on RocketMQ, or says by name what to use instead; no server is needed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from html import unescape
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, load_command_class

from outbox import hooks
from outbox.broker.operations.dead_letters import LetterSelection
from outbox.contrib.django.actions.declaration import DeclaredAction
from outbox.contrib.django.actions.listing import Listing
from outbox.contrib.django.catalogue import ACTIONS, LISTINGS, on_engine
from outbox.contrib.django.operations.known_conditions import observer
from outbox.contrib.rocketmq import dead_letter_notes, operations
from outbox.contrib.rocketmq.operator_table import COMMANDS, PAGES
from outbox.errors import UsageError
from outbox.message import stored_message
from outbox.rocketmq import inspection
from outbox.rocketmq.inspection import Letter
from outbox.utils.ids import uuid7
from tests.django.entry_points import say
from tests.django.operators import ALL, client_of, command_of, make_user
from tests.part_apps import app_of, command_files, has

ELSEWHERE = "this needs the tables of a broker in PostgreSQL"
ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs/maintainers/rocketmq-operations.md"


@pytest.fixture
def on_rocketmq(outbox_settings: Callable[..., None], no_subscribers: None) -> None:
    """Settings whose server does not exist."""
    topics: dict[str, Any] = {"orders": {}}
    outbox_settings(BROKER="rocketmq://127.0.0.1:1?brokers=127.0.0.1:1", PRODUCER_GROUP="shop", TOPICS=topics)


def every_command() -> Iterator[str]:
    """Each command, with its subcommands, and with the options that choose an action."""
    for path in command_files():
        command = load_command_class(app_of(path.stem), path.stem)
        parser = command.create_parser("manage.py", path.stem)
        words = [one for one in parser._actions if one.dest == "action"]
        if not words or not words[0].required:
            yield path.stem
        for one in words:
            assert one.choices is not None
            yield from (f"{path.stem} {word}" for word in one.choices)
    yield from (action.command for action in ACTIONS.values() if " --" in action.command)


def test_the_tables_name_commands_pages_and_metrics_that_exist() -> None:
    assert COMMANDS.keys() <= set(every_command())
    if has("console"):
        pages = [str(one.name) for one in import_module("outbox.contrib.console.urls").PAGES]
        assert PAGES.keys() <= {name for name in pages if not name.startswith("act_")}
    collector = (ROOT / "outbox/contrib/prometheus/collector.py").read_text(encoding="utf-8")
    of_parts = {name for module in hooks.metrics for name in import_module(module).METRICS}
    described = re.findall(r"^\| `(outbox_.+?)` \|", PAGE.read_text(encoding="utf-8").partition("## Metrics")[2], re.M)
    assert sorted(described) == sorted({*re.findall(r'"(outbox_\w+)"', collector), *of_parts})


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_command_that_lacks_says_what_to_use_instead(name: str, on_rocketmq: None) -> None:
    command, _, word = name.partition(" ")
    loaded = load_command_class(app_of(command), command)
    options = {word.removeprefix("--").replace("-", "_"): True} if word.startswith("--") else {"action": word or None}
    with pytest.raises(CommandError) as raised:
        loaded.execute(**{"force_color": False, "no_color": True, "skip_checks": True, **options})
    assert str(raised.value) == f"`{name}` does not work on RocketMQ. {COMMANDS[name]}"


def test_what_has_no_row_works_or_says_what_it_needs(databases: None, on_rocketmq: None) -> None:
    """A new action or listing needs no row: it asks for the tables of a broker, and the error names another way."""
    declared: list[Listing | DeclaredAction] = [*LISTINGS.values(), *ACTIONS.values()]
    without = [one for one in declared if one.command and one.command not in COMMANDS]
    refused = {one.name for one in without if ELSEWHERE in say(" ".join(command_of(one, "mail")))[1]}
    reading = [one for one in LISTINGS.values() if one.of_broker and on_engine(one) is one]
    assert refused >= {one.name for one in reading if one in without} | {"settle"}
    for listing in reading if has("console") else ():
        if listing.address and listing.name not in PAGES:
            answer = client_of(make_user(*ALL)).get(f"/outbox/{listing.address}")
            assert answer.status_code == 404 and ELSEWHERE in unescape(answer.content.decode())


def test_a_dead_letter_that_cannot_be_read_is_named_when_it_is_replayed(
    on_rocketmq: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No server is needed: its letters are given here."""
    message = stored_message(message_id=uuid7(), topic="orders", key="", tag="", body=b"foreign")
    letter = Letter(
        group="mail", message=message, stored_milliseconds=1, broker="b", problem="JSONDecodeError: no JSON"
    )
    monkeypatch.setattr(operations, "brokers", list)
    monkeypatch.setattr(operations, "_groups", lambda group: [group])
    monkeypatch.setattr(inspection, "dead_letters", lambda admins, group: [letter])
    monkeypatch.setattr(dead_letter_notes, "notes_of", lambda group: {})
    only = LetterSelection(message_ids=[message.message_id])
    for limit in (1, 10):
        with pytest.raises(
            UsageError, match=rf"{message.message_id} .*JSONDecodeError.*outbox_dead_letter discard mail"
        ):
            operations.settle_letters("mail", only, limit=limit, replay=True, dry_run=True)
        assert operations.settle_letters("mail", only, limit=limit, replay=False, dry_run=True) == 1
    assert operations.settle_letters("mail", LetterSelection(), limit=10, replay=True, dry_run=True) == 0


def test_nothing_is_refused_on_postgresql(outbox_settings: Callable[..., None]) -> None:
    assert observer() is None
