"""Settling by command: undecided transactions and dead letters, page by page, first as a dry run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.core.management.base import CommandError
from django.db import connections, transaction

from outbox import Delivery, Message
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.log import incidents
from outbox.broker.log.incidents import Incident
from outbox.broker.operations.broker_conditions import SETTLED_BY_OPERATORS
from outbox.contrib.django import message, publish, publish_messages, run_check_back, subscriber
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.engine.broker import get_broker
from outbox.contrib.django.operations.watching import look
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import PermanentError
from tests.django.broker_world import new_world
from tests.django.faults import wrong_ledger
from tests.django.state import decisions, rolled_back
from tests.django.support import call, call_json
from tests.django.test_commands import consume

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers")

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
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT count(*) FROM outbox_ledger WHERE transaction_id = %s", [one])
        assert cursor.fetchone() == (0,)
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


@pytest.mark.parametrize("arguments", [[], ["--all", "--parked"], [str(uuid4()), "--all"]])
def test_the_arguments_of_ask_are_checked(arguments: list[str]) -> None:
    with pytest.raises(CommandError, match="name transaction ids"):
        call("outbox_transaction", "ask", *arguments)


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
