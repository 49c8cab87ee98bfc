"""Applying a repair plan: verified on the primaries, done once through any kill, and audited."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connections, transaction
from django.utils import timezone

from outbox import Delivery, hooks
from outbox.contrib.django import message, publish, subscriber
from outbox.contrib.django.catalogue import ACTIONS
from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.django.engine.broker import flush
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.contrib.reconciliation.apply import turns
from outbox.contrib.reconciliation.steps import derived_id
from outbox.errors import PermanentError
from outbox.events import event
from outbox.message import Message
from tests.django import repair_publisher
from tests.django.broker_world import away
from tests.django.large_storage import large_bodies, objects, referred, remove_a_year_later
from tests.django.processes import process
from tests.django.repairs import AT, EFFECTS, Repair, finding, lost, save_finding
from tests.django.sessions import broker_connection
from tests.django.shop.models import Effect, Order
from tests.django.state import rolled_back, stored
from tests.django.support import consume, end_messages_lost, handle_all
from tests.support import eventually

pytestmark = [pytest.mark.usefixtures("databases", "no_subscribers", "no_events"), pytest.mark.timeout(180)]

STEPS = ["repair.after_intent", "repair.after_effect", "repair.after_outcome"]


@pytest.fixture
def repair(tmp_path: Path) -> Repair:
    return Repair(tmp_path)


# -- LOST ------------------------------------------------------------------------------------------------


def test_a_lost_row_is_published_once_under_its_derived_id(repair: Repair) -> None:
    Order.objects.create(number="7")
    shown = '14 bytes of application/json: {"number": "7"}'
    what = f"publish to 'orders' as {derived_id('orders', '7', AT)}: {shown}"
    assert repair.run(lost("7"), apply=False) == [("would be done", what)]
    assert stored() == [], "without --apply nothing is done"
    assert repair.recorded() == []
    assert repair.outcomes(lost("7")) == ["done"]
    assert repair.run(lost("7"))[0] == ("settled", f"published already, as {derived_id('orders', '7', AT)}")
    assert [(item.message_id, item.key, item.decision) for item in stored()] == [
        (derived_id("orders", "7", AT), "7", "C")
    ]
    [entry] = repair.recorded()
    assert (entry.action, entry.outcome, entry.why) == ("repair", "done", "a test")
    assert entry.subject == "LOST orders, key 7" and entry.who.endswith("(command)")
    assert (entry.before["rows"], entry.before["messages"], entry.before["step"]) == (1, {}, "LOST 7")
    assert entry.after["outcome"] == "done" and entry.after[str(derived_id("orders", "7", AT))] == "committed"


def test_the_derived_id_has_the_time_of_the_row() -> None:
    made = derived_id("orders", "7", AT)
    assert (made.version, made.variant) == (7, "specified in RFC 4122")
    assert made.int >> 80 == int(AT.timestamp() * 1000)
    assert len({made, derived_id("orders", "8", AT), derived_id("others", "7", AT)}) == 3


def test_what_holds_no_longer_is_settled(repair: Repair) -> None:
    Order.objects.create(number="1")
    Order.objects.create(number="2", status="shut")
    with transaction.atomic():
        Order.objects.create(number="4")
        publish("orders", {}, key="4")
    flush(within_seconds=5)
    steps = [lost("2"), lost("3"), lost("4")]
    assert repair.run(*steps) == [
        ("settled", "the row was deleted, or no longer satisfies the rule"),
        ("settled", "the row was deleted, or no longer satisfies the rule"),
        ("settled", "the broker now has a message of this key"),
    ]
    assert [item.key for item in stored()] == ["4"]


@pytest.mark.parametrize("parked", [False, True])
def test_it_refuses_while_a_half_of_the_key_is_undecided(repair: Repair, parked: bool) -> None:
    undecided("9")
    if parked:
        park()
    state = "parked" if parked else "undecided"
    (outcome,) = repair.run(lost("9"))
    assert outcome == (
        "refused",
        f"message {stored()[0].message_id} of this key is {state}: decide its transaction first",
    )
    assert len(stored()) == 1


def test_a_rolled_back_message_does_not_stand_in_the_way(repair: Repair) -> None:
    Order.objects.create(number="5")
    with rolled_back():
        publish("orders", {}, key="5")
    (half,) = stored()
    assert repair.outcomes(finding("ask", "HALF_STUCK", "5", transaction_id=str(half.message_id))) in (
        ["done"],
        ["settled"],
    )
    assert repair.outcomes(lost("5")) == ["done"]
    assert [item.decision for item in stored()] == ["R", "C"]


@pytest.mark.parametrize(
    ("body", "is_handled", "key_has_a_row"),
    [
        ({"order": {"number": "7"}}, True, True),
        ({"order": {"number": "7"}}, False, False),
        ({"items": ["x", "7"]}, False, True),
    ],
)
def test_a_message_that_came_under_another_key_is_not_published_again(
    repair: Repair, body: dict[str, Any], key_has_a_row: bool, is_handled: bool
) -> None:
    """Whether its group has acted on it or not: the inbox knows it by its id, and the repair would give it another."""
    repair.source["effects"] = [EFFECTS]
    Order.objects.create(number="7")
    if key_has_a_row:
        Order.objects.create(number="wrong")
        publish("orders", {}, key="wrong", at_once=True)
    receipt = publish("orders", body, key="wrong", at_once=True)
    flush(within_seconds=5)
    if is_handled:
        Effect.objects.using("other").create(number="7")
    for apply in (False, True):
        ((outcome, detail),) = repair.run(lost("7"), apply=apply)
        assert outcome == "refused" and detail.startswith(f"message {receipt.message_id} (committed) has another key")
    assert {item.key for item in stored()} == {"wrong"}


def test_a_row_whose_key_was_changed_is_not_published_again(repair: Repair) -> None:
    """By a plan that was made before: to the groups, a message under the new key would be another order."""
    for number in ("2", "3"):
        with transaction.atomic():
            Order.objects.create(number=number)
            publish("orders", {"number": number}, key=number)
    flush(within_seconds=5)
    former = next(item for item in stored() if item.key == "2")
    Order.objects.filter(number="2").update(number="92002")
    step = {**lost("92002"), "row_at": timezone.now().isoformat()}
    for apply in (False, True):
        ((outcome, detail),) = repair.run(step, apply=apply)
        assert outcome == "refused" and detail.startswith(
            f"message {former.message_id} (committed) has the key '2', for which there is no row, and the body of this "
        )
    assert {item.key for item in stored()} == {"2", "3"}
    # With the row of the former key, it is that row's message.
    Order.objects.create(number="2")
    assert repair.outcomes(step) == ["done"]


def test_messages_about_other_rows_do_not_stand_in_the_way(repair: Repair) -> None:
    """They hold the key's text: as a number of things, as a part of a word, or as the key of a message of a row."""
    repair.source["effects"] = [EFFECTS]
    for number in ("7", "8"):
        Order.objects.create(number=number)
    publish("orders", {"amount": 7}, key="8", at_once=True)
    publish("orders", {"order": "77", "7": "x"}, key="nobody's", at_once=True)
    flush(within_seconds=5)
    assert repair.outcomes(lost("7")) == ["done"]


def test_a_row_on_which_a_group_has_acted_is_not_published_again(repair: Repair) -> None:
    """Its message is gone, as after a restore: under another id the inbox would not know it."""
    repair.source["effects"] = [EFFECTS, {**EFFECTS, "group": "points", "when": "(number LIKE 'n%')"}]
    for number in ("7", "9"):
        Order.objects.create(number=number)
    Effect.objects.using("other").create(number="7")
    refused, done = repair.run(lost("7"), lost("9"))
    assert (refused[0], done[0]) == ("refused", "done")
    assert refused[1].startswith("logistics acted on this key already")
    assert [item.key for item in stored()] == ["9"]


def test_it_waits_for_a_publisher_of_the_same_key(repair: Repair) -> None:
    """The lock is taken before the first read, so a message that was being published is seen."""
    Order.objects.create(number="11")
    repair.source["topic"], repair.publisher = "steps", "orders=tests.django.repair_publisher.step"
    found: list[list[str]] = []

    def run() -> None:
        found.append(repair.outcomes(lost("11", topic="steps")))
        connections.close_all()

    with transaction.atomic():
        publish("steps", {}, key="11")
        applying = threading.Thread(target=run)
        applying.start()
        eventually(waits_for_a_lock, within_seconds=30, what="the apply to wait for the key")
    flush(within_seconds=5)
    applying.join(30)
    # The half is decided by now, or still on its way; a second message was not sent in either case.
    assert found in ([["settled"]], [["refused"]])
    assert len(stored()) == 1


def waits_for_a_lock() -> bool:
    with psycopg.connect(alias_conninfo("default"), autocommit=True) as connection:
        row = connection.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted").fetchone()
    return row is not None and row[0] == 1


@pytest.mark.parametrize(
    ("publisher", "why"),
    [
        ("others=tests.django.repair_publisher.order", "the function that makes the message of a row is not known"),
        ("orders=tests.django.repair_publisher.broken", "the publisher failed: RuntimeError: no price"),
        ("orders=tests.django.repair_publisher.elsewhere", "is not the missing message"),
    ],
)
def test_a_publisher_that_is_not_right_is_refused(repair: Repair, publisher: str, why: str) -> None:
    Order.objects.create(number="7")
    repair.publisher = publisher
    ((outcome, detail),) = repair.run(lost("7"))
    assert outcome == "refused"
    assert why in detail
    assert stored() == []


def test_a_message_of_a_versioned_event_needs_its_type(repair: Repair) -> None:
    """Subscribers would read a message without a type as version 1 of the event."""
    Order.objects.create(number="7")
    event("order.lost", version=2, topic="orders")(repair_publisher.OrderPlaced)
    ((outcome, detail),) = repair.run(lost("7"))
    assert (outcome, stored()) == ("refused", [])
    remedy = "Its newest version is 2: return message(OrderPlaced(…), key=…)"
    assert f"read as version 1 of the event 'order.lost'. {remedy}" in detail
    repair.publisher = "orders=tests.django.repair_publisher.typed"
    ((outcome, detail),) = repair.run(lost("7"), apply=False)
    assert (outcome, detail.partition(": ")[2]) == (
        "would be done",
        'event \'order.lost\' version 2, 14 bytes of application/json: {"number": "7"}',
    )
    assert repair.outcomes(lost("7")) == ["done"]


def test_a_key_that_is_no_value_of_its_column_is_refused(repair: Repair) -> None:
    Order.objects.create(number="7")
    repair.source["key"] = '"id"'
    ((outcome, detail),) = repair.run(lost("seven"))
    assert (outcome, "cannot be read with the rule's SQL" in detail) == ("refused", True)
    assert repair.outcomes(lost("7' OR true --")) == ["refused"]


# -- DEAD and HALF_STUCK -----------------------------------------------------------------------------------


def subscribe() -> None:
    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        if not Effect.objects.filter(number="mended").exists():
            raise PermanentError("not yet")
        Effect.objects.create(number=delivery.key)

    consumer_runtime().run_once()


def dead_letter(key: str = "1") -> dict[str, Any]:
    """A message that its group gives up once; the step that replays it."""

    subscribe()
    receipt = publish("orders", {}, key=key, at_once=True)
    consume()
    Effect.objects.create(number="mended")
    return finding("replay", "DEAD", key, group="effects", message_id=str(receipt.message_id))


def test_a_dead_letter_is_replayed_once(repair: Repair) -> None:
    step = dead_letter()
    assert repair.outcomes(step, apply=False) == ["would be done"]
    assert repair.outcomes(step, step) == ["done", "settled"]
    handle_all()
    assert [effect.number for effect in Effect.objects.order_by("pk")] == ["mended", "1"]


def undecided(key: str, *, commit: bool = True) -> dict[str, Any]:
    """A half whose end got lost, and the step that requests its check."""
    with end_messages_lost(), transaction.atomic() if commit else rolled_back():
        Order.objects.create(number=key)
        publish("orders", {}, key=key)
    half = stored()[-1]
    assert half.decision is None
    return finding("ask", "HALF_STUCK", key, transaction_id=str(half.message_id))


def park() -> None:
    with broker_connection() as (connection, _):
        connection.execute(
            "INSERT INTO outbox.pending_check AS p (transaction_id, log_id, producer_group, stored_at, immune_until, "
            "due_at, parked_at) SELECT transaction_id, log_id, producer_group, stored_at, now(), now(), now() "
            "FROM outbox.commit_log WHERE half AND message_id = transaction_id "
            "ON CONFLICT (transaction_id) DO UPDATE SET parked_at = now()"
        )


@pytest.mark.parametrize(("commit", "decision", "parked"), [(True, "C", True), (False, "R", False)])
def test_a_stuck_half_is_decided_as_its_ledger_proves(
    repair: Repair, commit: bool, decision: str, parked: bool
) -> None:
    step = undecided("3", commit=commit)
    if parked:
        park()
    assert repair.outcomes(step, step) == ["done", "settled"]
    assert [item.decision for item in stored()] == [decision]


# -- killed --------------------------------------------------------------------------------------------------


def test_every_step_is_killed() -> None:
    assert sorted(STEPS) == sorted(point for point in hooks.fault_points if point.startswith("repair."))


@pytest.mark.parametrize(
    "action", ["publish", *(pytest.param(action, marks=pytest.mark.slow) for action in ("replay", "ask"))]
)
@pytest.mark.parametrize("point", STEPS)
def test_killed_at_any_step_and_run_again_has_one_effect(repair: Repair, point: str, action: str) -> None:
    if action != "replay":
        subscribe()
    if action == "publish":
        Order.objects.create(number="7")
        step = lost("7")
    else:
        step = dead_letter("7") if action == "replay" else undecided("7")
    arguments = ["-m", "django", *repair.command(step)]
    with process(arguments, outbox={"BROKER": get_settings().broker}, faults=f"{point}=kill") as killed:
        killed.communicate(timeout=60)
        assert killed.returncode == -signal.SIGKILL
    assert repair.outcomes(step) == ["done" if point == "repair.after_intent" else "settled"]
    assert repair.outcomes(step) == ["settled"]
    assert [(item.key, item.decision) for item in stored()] == [("7", "C")]
    Effect.objects.get_or_create(number="mended")
    handle_all()
    assert [effect.number for effect in Effect.objects.exclude(number="mended")] == ["7"]
    assert repair.recorded()[0].outcome == ("done" if point == "repair.after_outcome" else "begun")


# -- the run as a whole: its limits, its audit, and what ends it ------------------------------------


def test_no_more_than_allowed_and_reports_are_for_people(repair: Repair) -> None:
    for number in ("1", "2", "3"):
        Order.objects.create(number=number)
    report = finding("report", "ORPHAN", "8", why="ORPHAN is only reported.")
    steps = [report, lost("1"), lost("2"), lost("3")]
    assert repair.outcomes(*steps, more=("--most", "2")) == ["reported", "done", "done", "left"]
    assert repair.outcomes(*steps, more=("--most", "2")) == ["reported", "settled", "settled", "done"]
    assert [item.key for item in stored()] == ["1", "2", "3"]


def test_steps_are_spaced_and_unused_slots_are_not_saved_up() -> None:
    now, waited = [100.0], []

    def wait(seconds: float) -> None:
        waited.append(round(seconds, 3))
        now[0] += seconds

    pace = turns(4, clock=lambda: now[0], wait=wait)
    for _ in range(3):
        next(pace)
    assert waited == [0.25, 0.25]
    now[0] += 10
    for _ in range(2):
        next(pace)
    assert waited == [0.25, 0.25, 0.25]


def test_a_broker_that_cannot_be_reached_ends_the_run(repair: Repair) -> None:
    Order.objects.create(number="7")
    with away("broker"), pytest.raises(CommandError, match="does not repeat completed steps") as caught:
        repair.run(lost("7"))
    assert caught.value.returncode == 3
    assert repair.recorded() == []
    assert repair.outcomes(lost("7")) == ["done"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"plan\.jsonl is empty, so `outbox-reconcile plan` has failed"),
        ("{", r"plan\.jsonl:1: not a line of a plan"),
        ('{"plan": 1}', "a plan of version 1.*Make the plan again"),
        ('{"plan": 2, "run": "r", "rules": {}}\n{"step": 1}', r"plan\.jsonl:2: not a line"),
    ],
)
def test_what_is_no_plan_is_named_by_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "plan.jsonl"
    path.write_text(text)
    with pytest.raises(CommandError, match=said) as caught:
        call_command("outbox_repair", str(path))
    assert caught.value.returncode == 2


def test_a_database_without_an_alias_is_an_error(repair: Repair) -> None:
    repair.source["database"] = "app"
    with pytest.raises(CommandError, match="pass --database app=ALIAS") as caught:
        repair.run(lost("7"))
    assert caught.value.returncode == 2
    Order.objects.create(number="7")
    assert repair.outcomes(lost("7"), more=("--database", "app=default")) == ["done"]
    assert len(repair.recorded()) == 1


# -- the values of a row, and of the message that is made from it -----------------------------------


WIDE = (
    """(SELECT number, status, '{"lines": [1, 2.5], "card": "4111"}'::jsonb AS cart, '[1]'::json AS old,"""
    """ 12.50::numeric AS total, '2025-06-01 12:00+00'::timestamptz AS paid_at FROM shop_order) wide"""
)
rows: list[Mapping[str, Any]] = []


def wide(row: Mapping[str, Any]) -> Message:
    """The message of a row with values of many types."""
    rows.append(row)
    return message("orders", {"cart": row["cart"], "total": str(row["total"])}, key=row["number"])


def test_a_row_has_the_types_of_a_model_and_the_dry_run_shows_the_values(
    tmp_path: Path, outbox_settings: Callable[..., None]
) -> None:
    repair = Repair(tmp_path, publisher="orders=tests.django.test_repair.wide")
    repair.source["table"] = WIDE
    Order.objects.create(number="7")
    rows.clear()
    [(outcome, shown)] = repair.run(lost("7"), apply=False)
    assert outcome == "would be done"
    assert shown.endswith('of application/json: {"cart": {"card": "4111", "lines": [1, 2.5]}, "total": "12.50"}')
    [row] = rows
    assert row == {
        "number": "7",
        "status": "new",
        "cart": {"lines": [1, 2.5], "card": "4111"},
        "old": [1],
        "total": Decimal("12.50"),
        "paid_at": AT,
    }
    outbox_settings(MASKED_FIELDS={"*": ["card"]})
    [(_, shown)] = repair.run(lost("7"), apply=False)
    assert '"card": "***"' in shown and "4111" not in shown
    assert repair.outcomes(lost("7")) == ["done"]
    with broker_connection() as (connection, schema):
        [(body,)] = connection.execute(f"SELECT body FROM {schema}.message_v1").fetchall()
    assert json.loads(body)["cart"] == {"lines": [1, 2.5], "card": "4111"}


def test_the_audit_of_a_repair_has_no_content(tmp_path: Path, outbox_settings: Callable[..., None]) -> None:
    """No erasure by key or id would find it there."""
    repair = Repair(tmp_path, publisher="orders=tests.django.test_repair.wide")
    repair.source["table"] = WIDE
    Order.objects.create(number="7")
    [(_, shown)] = repair.run(lost("7"), apply=False)
    assert "4111" in shown, "the operator sees what would be published"
    assert repair.outcomes(lost("7")) == ["done"]
    [entry] = repair.recorded()
    assert "4111" not in f"{entry.subject} {entry.effect} {entry.before} {entry.after}"
    outbox_settings(REPAIR_PUBLISHERS={"orders": "tests.django.repair_publisher.order"})
    Order.objects.create(number="8")
    plan = ACTIONS["repair"].plan({"finding": save_finding(lost("8")).pk})
    assert '{"number": "8"}' in plan.caution and '{"number"' not in plan.effect


def large(row: Mapping[str, Any]) -> Message:
    """A message whose body is an object of the storage."""
    return message("orders", {"number": row["number"], "scan": "…" * 1_000}, key=row["number"])


def test_a_large_body_stays_as_long_as_the_message_of_the_repair(
    tmp_path: Path, outbox_settings: Callable[..., None]
) -> None:
    repair = Repair(tmp_path, publisher="orders=tests.django.test_repair.large")
    Order.objects.create(number="7")
    with large_bodies(tmp_path / "large", outbox_settings) as folder:
        [(planned, what)] = repair.run(lost("7"), apply=False)
        assert planned == "would be done" and what.startswith("publish to 'orders', with a new id: ")
        assert repair.outcomes(lost("7")) == ["done"]
        assert repair.outcomes(lost("7")) == ["settled"]
        remove_a_year_later()
        assert len(referred()) == 1 and set(objects(folder)) == referred()


def test_a_half_message_with_another_id_than_its_transaction_is_not_settled(tmp_path: Path) -> None:
    """The broker cannot end such a transaction, so the finding holds until a person has looked at it."""
    message_id, transaction_id = undecided("3")["transaction_id"], str(uuid4())
    with broker_connection() as (connection, schema):
        connection.execute(
            f"UPDATE {schema}.commit_log SET transaction_id = %s WHERE message_id = %s", [transaction_id, message_id]
        )
    step = finding("ask", "HALF_STUCK", "3", message_id=message_id, transaction_id=transaction_id)
    assert Repair(tmp_path).outcomes(step) == ["refused"]
    assert [item.decision for item in stored()] == [None]
