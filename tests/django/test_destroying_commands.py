"""Commands that destroy: they count, name the losses, ask for confirmation, and refuse while processes live."""

from __future__ import annotations

import re
import sys
from io import StringIO
from uuid import uuid4

import pytest
from django.core.management.base import CommandError
from django.db import transaction

from outbox import Delivery
from outbox.contrib.django import publish, subscriber
from outbox.errors import PermanentError
from tests.django.state import decisions
from tests.django.support import call, call_json, ended, sequence
from tests.django.test_commands import consume

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers")


@pytest.fixture(autouse=True)
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


@pytest.mark.parametrize(
    "selection", [[], ["--all", "--error", "x"], ["--since", "yesterday"], ["--since", "2026-01-01T00:00:00"]]
)
def test_the_arguments_of_discard_are_checked(selection: list[str]) -> None:
    with pytest.raises(CommandError, match=r"--all|write it like|time zone"):
        call("outbox_dead_letter", "discard", "effects", "--no-input", *selection)


def _offsets() -> list[int]:
    return [queue["next_offset"] for queue in call_json("outbox_group", "offsets", "effects")]


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


def test_a_reset_to_before_needs_no_confirmation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO(""))
    assert "Done." in call("outbox_group", "reset", "effects", "orders", "--to-earliest")


def test_deciding_past_the_ledger_asks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with transaction.atomic():
        receipt = publish("orders", {}, key="running")
        decide = ["outbox_transaction", "decide", str(receipt.transaction_id), "rollback", "--force"]
        with pytest.raises(CommandError, match="may still run"):
            call(*decide)
        decide.append("--running")
        monkeypatch.setattr(sys, "stdin", StringIO("no\n"))
        with pytest.raises(CommandError, match="nothing was changed"):
            call(*decide)
        assert decisions()["running"] is None
        monkeypatch.setattr(sys, "stdin", StringIO("yes\n"))
        assert "applied" in call(*decide)
    assert decisions()["running"] == "R"


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
