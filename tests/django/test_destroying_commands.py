"""Commands that destroy: counted and confirmed first, told what is lost, and refused while somebody is there."""

from __future__ import annotations

import json
import sys
from io import StringIO

import pytest
from django.core.management.base import CommandError

from outbox import Delivery
from outbox.contrib.django import publish, subscriber
from outbox.errors import PermanentError, UnknownTopic
from tests.django.test_commands import call, call_json, consume

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers")


@pytest.fixture(autouse=True)
def _poison(databases: None, no_subscribers: None) -> None:
    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        if delivery.key.startswith("poison"):
            raise PermanentError(f"cannot ever work: {delivery.key}")

    for key in ("poison 1", "poison 2", "good"):
        publish("orders", {}, key=key)
    consume()


def _keys(*arguments: str) -> list[str]:
    return sorted(item["letter"]["key"] for item in call_json("outbox_dead_letter", "list", *arguments))


def test_dead_letters_are_discarded_after_a_confirmation(monkeypatch: pytest.MonkeyPatch) -> None:
    discard = ("outbox_dead_letter", "discard", "effects", "--error", "poison 1")
    assert call(*discard, "--dry-run") == "1 dead letters would be discarded.\n"
    assert call_json(*discard, "--dry-run") == {"count": 1, "dry_run": True}
    for answer, complaint in (("", "pass --no-input"), ("no\n", "nothing was changed")):
        monkeypatch.setattr(sys, "stdin", StringIO(answer))
        with pytest.raises(CommandError, match=complaint):
            call(*discard)
    assert _keys("effects") == ["poison 1", "poison 2"]
    monkeypatch.setattr(sys, "stdin", StringIO("yes\n"))
    assert "1 dead letters are discarded." in call(*discard)
    assert _keys("effects", "--error-type", "PermanentError") == ["poison 2"]
    assert _keys("effects", "--replayed") == ["poison 1", "poison 2"]
    assert call_json("outbox_dead_letter", "discard", "effects", "--all", "--no-input") == {
        "count": 1,
        "dry_run": False,
    }
    assert _keys("effects") == []
    with pytest.raises(SystemExit):
        call("outbox_status")  # nobody sequences
    assert "handled" in call("outbox_group", "offsets", "effects")


@pytest.mark.parametrize(
    "selection", [[], ["--all", "--error", "x"], ["--since", "yesterday"], ["--since", "2026-01-01T00:00:00"]]
)
def test_what_to_discard_is_said_clearly(selection: list[str]) -> None:
    with pytest.raises(CommandError, match=r"--all|write it like|time zone"):
        call("outbox_dead_letter", "discard", "effects", "--no-input", *selection)


def test_a_group_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = call_json("outbox_group", "delete", "effects", "--dry-run")
    loss = {"group": "effects", "topic": "orders", "lag": 0, "retrying": 0, "dead": 2}
    assert planned == {"deleted": False, "losses": [loss]}
    monkeypatch.setattr(sys, "stdin", StringIO(""))
    with pytest.raises(CommandError, match="0 messages not consumed, 0 that are retried, 2 dead letters"):
        call("outbox_group", "delete", "effects")
    with pytest.raises(CommandError, match="no subscription to 'payments'; it has: orders"):
        call("outbox_group", "delete", "effects", "--topic", "payments", "--no-input")
    assert "effects was deleted" in call("outbox_group", "delete", "effects", "--no-input")
    assert json.loads(call("outbox_group", "list", "--json")) == []
    with pytest.raises(CommandError, match="'effects' is not known"):
        call("outbox_group", "delete", "effects", "--no-input")


def test_a_topic_is_deleted_and_takes_no_more_messages() -> None:
    assert "nothing was deleted" in call("outbox_topic", "delete", "orders", "--dry-run")
    deleted = call_json("outbox_topic", "delete", "orders", "--no-input")
    assert deleted["loss"]["groups"] == [{"group": "effects", "topic": "orders", "lag": 0, "retrying": 0, "dead": 2}]
    with pytest.raises(UnknownTopic):
        publish("orders", {}, key="too late")
    with pytest.raises(CommandError, match="'orders' is not declared"):
        call("outbox_topic", "delete", "orders", "--no-input")
