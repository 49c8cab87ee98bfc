"""Where parts join publish and pruning: options that admit messages, and tables that pruning empties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import UUID

import pytest
from django.db import DatabaseError, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from outbox import hooks
from outbox.contrib.django import message, publish_messages, run_prune
from outbox.contrib.django.ledger.ledger_checker import ledger_aliases
from outbox.errors import LedgerUnavailable, UsageError
from outbox.hooks import Option
from outbox.message import Message
from tests.django.shop.models import Order
from tests.django.state import stored

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
