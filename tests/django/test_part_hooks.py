"""Where parts join publish and pruning: options that admit messages, and tables that pruning empties."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import UUID

import pytest
from django.core.management import CommandError, call_command
from django.db import DatabaseError, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from outbox import hooks
from outbox.contrib.django import (
    message,
    publish,
    publish_many,
    publish_messages,
    run_prune,
    transactional_message,
)
from outbox.contrib.django.ledger.ledger_checker import ledger_aliases
from outbox.contrib.django.worker import child, roles
from outbox.contrib.django.worker.roles import child_specs, known_roles
from outbox.errors import ConfigurationError, LedgerUnavailable, UsageError
from outbox.hooks import Draft, Option
from outbox.message import Message
from tests.django.shop.models import Order
from tests.django.state import bodies, decisions, stored

pytestmark = pytest.mark.usefixtures("empty_log")


@dataclass(frozen=True)
class Counted(Option):
    """All but the first message of a call with the same text are duplicates of the first."""

    text: str

    is_kept: ClassVar[bool] = True
    seen: ClassVar[list[tuple[bool, list[str]]]] = []

    @classmethod
    def admit(cls, connection: Any, wanted: Sequence[tuple[Message, Counted]]) -> Mapping[UUID, UUID]:
        """See Option."""
        cls.seen.append((connection.in_atomic_block, [one.key for one, _ in wanted]))
        first: dict[str, UUID] = {}
        for one, option in wanted:
            first.setdefault(option.text, one.message_id)
        return {one.message_id: first[option.text] for one, option in wanted if first[option.text] != one.message_id}


class Later(Counted):
    """Another class of options."""

    seen: ClassVar[list[tuple[bool, list[str]]]] = []


class Refusing(Counted):
    """An option that refuses every message."""

    @classmethod
    def admit(cls, connection: Any, wanted: Sequence[tuple[Message, Counted]]) -> Mapping[UUID, UUID]:
        """See Option."""
        raise UsageError("refused")


def test_an_option_says_which_messages_are_duplicates() -> None:
    Counted.seen.clear()
    Later.seen.clear()
    with transaction.atomic():
        built = [
            message("orders", {}, Counted("x"), key="1"),
            message("orders", {}, Counted("x"), Later("y"), key="2"),
            message("orders", {}, key="3"),
            message("orders", {}, Later("y"), key="4"),
        ]
        receipts = publish_messages(built)
        assert Counted.seen == [(True, ["1", "2"])]
    assert Later.seen == [(True, ["4"])], "a duplicate is not shown to the next class"
    assert [one.duplicate_of for one in receipts] == [None, built[0].message_id, None, None]
    assert [one.key for one in stored()] == ["1", "3", "4"]


def test_an_error_of_an_option_refuses_the_call_and_rolls_the_block_back() -> None:
    with transaction.atomic():
        Order.objects.create(number="with a refused message")
        with pytest.raises(UsageError, match="refused"):
            publish_messages([message("orders", {}, key="1"), message("orders", {}, Refusing("x"), key="2")])
    assert (stored(), Order.objects.count()) == ([], 0)


# -- pruning -----------------------------------------------------------------------------------------

calls: list[str] = []


def prune_all(connection: BaseDatabaseWrapper, *, limit: int) -> int:
    """Remove all rows that one statement may remove, then none."""
    calls.append(connection.alias)
    return limit if calls.count(connection.alias) == 1 else 0


def fail(connection: BaseDatabaseWrapper, *, limit: int) -> int:
    """Fail as a table does that is not there."""
    raise DatabaseError("no such table")


def test_pruning_empties_the_tables_of_parts_also_if_one_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls.clear()
    monkeypatch.setattr("outbox.contrib.django.ledger.pruning._BATCH", 3)
    monkeypatch.setattr(hooks, "prunings", {"emptied": f"{__name__}.prune_all"})
    counts = run_prune()
    assert (counts.of_parts, counts.more) == ({"emptied": 3 * len(ledger_aliases())}, False)
    monkeypatch.setattr(hooks, "prunings", {"broken": f"{__name__}.fail", "emptied": f"{__name__}.prune_all"})
    calls.clear()
    with pytest.raises(LedgerUnavailable, match="broken could not be pruned"):
        run_prune()
    assert set(calls) == set(ledger_aliases())


# -- options of messages ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Signed(Option):
    """Writes a name behind the body."""

    name: str

    def encode(self, draft: Draft) -> None:
        if not self.name:
            raise UsageError(f"topic {draft.topic!r}: nobody has signed.")
        draft.body = draft.body[:-1] + f',"by":"{self.name}"}}'.encode()


def test_every_way_to_publish_takes_options(path: str) -> None:
    @transactional_message("orders", lambda who: Signed(who), Signed("b"), body={"id": 5})
    def decorated(who: str) -> None: ...

    with transaction.atomic():
        publish("orders", {"id": 1}, Signed("a"))
        publish_many("orders", [{"id": "c"}, {"id": "d"}], lambda body: Signed(body["id"]))
        publish_messages([message("orders", {"id": 1}, Signed("e")), message("orders", {"id": 4}, Signed("f"))])
    decorated("h")
    assert [body["by"] for body in bodies()] == ["a", "c", "d", "e", "f", "b"]


def test_an_option_refuses_the_message_and_the_block() -> None:
    def sign_with(*names: str) -> None:
        with transaction.atomic():
            for name in names:
                publish("orders", {"id": 1}, Signed(name))

    with pytest.raises(UsageError, match="nobody has signed"):
        sign_with("a", "")
    with pytest.raises(UsageError, match="'orders': the argument 'key-1' after the body is not an option"):
        publish("orders", {"id": 1}, "key-1", at_once=True)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not an option"):
        publish_many("orders", [{"id": 1}], lambda body: None, at_once=True)  # type: ignore[arg-type,return-value]
    with pytest.raises(UsageError, match="not an option"):
        transactional_message("orders", 7, body={})  # type: ignore[call-overload]
    with pytest.raises(ConfigurationError, match="option 1= of"):

        @transactional_message("orders", lambda other: Signed(other), body={})
        def decorated(who: str) -> None: ...

    with pytest.raises(ConfigurationError, match="option 1"):
        transactional_message("", Signed("a"), messages=list)  # type: ignore[call-overload]
    assert "C" not in decisions().values()


# -- roles of worker processes ----------------------------------------------------------------------


ran: list[tuple[str, Sequence[str]]] = []
needed = [True]


def run(stop: threading.Event, names: Sequence[str]) -> None:
    ran.append(("run", names))


def drain(names: Sequence[str]) -> str:
    ran.append(("drain", names))
    return "two greetings sent"


def is_needed() -> bool:
    return needed[0]


@pytest.fixture
def greeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The role `greet` of a part, with an option of its own."""
    monkeypatch.setattr(roles, "refuse_processes_in_tests", lambda: None)
    role = hooks.Role(
        "greet everybody",
        run=f"{__name__}.run",
        drain=f"{__name__}.drain",
        option="guest",
        is_needed=f"{__name__}.is_needed",
    )
    monkeypatch.setitem(hooks.roles, "greet", role)
    ran.clear()
    needed[0] = True


def names(*of: str) -> list[str]:
    return [spec.name for spec in child_specs(of)]


@pytest.mark.usefixtures("greeting")
def test_a_worker_starts_a_process_for_it_if_it_is_needed() -> None:
    assert "greet" in names() and "greet" in known_roles()
    [spec] = child_specs(["greet"])
    assert (spec.name, spec.argv[3:], spec.on_death) == ("greet", ["greet"], None)
    needed[0] = False
    assert "greet" not in names() and names("greet") == ["greet"]
    with pytest.raises(ConfigurationError, match=r"there is no role great; choose from broker, .*greet"):
        child_specs(["great"])


@pytest.mark.usefixtures("greeting")
def test_its_process_runs_its_function() -> None:
    child.run_roles(["greet"], threading.Event(), groups=[])
    assert ran == [("run", [])]
    with pytest.raises(ConfigurationError, match="there is no role great"):
        child.run_roles(["great"], threading.Event(), groups=[])


@pytest.mark.usefixtures("greeting")
def test_the_command_passes_the_names_of_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    call_command("outbox_worker", "--role", "greet", "--guest", "ann", "--guest", "bob")
    call_command("outbox_worker", "--role", "greet", "--drain")
    assert ran == [("run", ["ann", "bob"]), ("drain", [])]
    assert "two greetings sent" in capsys.readouterr().out
    with pytest.raises(CommandError, match="--guest needs --role greet"):
        call_command("outbox_worker", "--role", "consumer", "--guest", "ann")
    with pytest.raises(CommandError, match="--group needs --role consumer"):
        call_command("outbox_worker", "--role", "greet", "--group", "ann")


@pytest.mark.usefixtures("greeting")
def test_a_role_without_drain_refuses_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hooks.roles, "greet", hooks.Role("greet everybody", run=f"{__name__}.run"))
    with pytest.raises(CommandError, match="--drain does the work of all roles"):
        call_command("outbox_worker", "--role", "greet", "--drain")
