"""Undecided transactions on the page: found, understood, settled; with what is written to the audit."""

from __future__ import annotations

import html
import re
from uuid import UUID

import pytest
from django.db import transaction
from django.test import Client

from outbox.broker.transaction import checks
from outbox.broker.transaction.turns import CHECK_BACK, take_turn
from outbox.contrib.django import fenced_producer, publish, run_check_back
from outbox.contrib.django.actions.audit import recorded
from outbox.contrib.django.actions.declaration import ActionPlan
from outbox.contrib.django.engine.broker import flush
from outbox.contrib.django.models import OperatorAction
from outbox.errors import LeftoversUndecided, UsageError
from outbox.transaction import CheckSettings
from tests.django.broker_world import World
from tests.django.operators import bury, client_of, make_user
from tests.django.shop.models import Order
from tests.django.support import sequence
from tests.django.test_fenced_producers import in_thread, send

pytestmark = pytest.mark.usefixtures("no_subscribers", "one_session")


def lost_end(world: World, key: str = "order-7") -> UUID:
    """A committed transaction whose end is missing: undecided until check-back reads the ledger."""
    with transaction.atomic():
        Order.objects.create(number=key)
        receipt = publish("orders", {"number": key, "password": "hunter2"}, key=key)
    flush(within_seconds=5)
    world.sql("DELETE FROM outbox.op_log")
    world.sql(
        "INSERT INTO outbox.pending_check (transaction_id, log_id, producer_group, stored_at, immune_until, due_at)"
        " SELECT transaction_id, log_id, producer_group, now(), now(), now() FROM outbox.commit_log"
    )
    transaction_id: UUID = receipt.transaction_id
    return transaction_id


def decision(world: World) -> list[tuple[str, str]]:
    return [(one, by) for one, by in world.sql("SELECT decision::text, decided_by::text FROM outbox.op_log")]


def test_what_is_undecided_is_listed_with_what_can_be_done(world: World, operator: Client) -> None:
    transaction_id = lost_end(world)
    for path in ("/outbox/undecided/", f"/outbox/messages/{transaction_id}/"):
        page = operator.get(path).content.decode()
        assert f"/outbox/messages/{transaction_id}/" in page and "order-7" in page
        assert "Commit …" in page and "No process of shop has checked transactions lately" in page
        assert "Ask again" not in page, "no process would answer"
    assert take_turn(world.run, "shop", CHECK_BACK, interval_seconds=30)
    for path in ("/outbox/undecided/", f"/outbox/messages/{transaction_id}/"):
        page = operator.get(path).content.decode()
        assert "Commit …" in page and "Ask again" in page and "No process of" not in page
    reader = client_of(make_user("view_operations")).get("/outbox/undecided/").content.decode()
    assert str(transaction_id) in reader and "Commit …" not in reader
    assert str(transaction_id) not in operator.get("/outbox/undecided/?parked=yes").content.decode()


def test_an_open_transaction_of_a_fenced_producer_is_listed_before_its_first_check(
    world: World, operator: Client
) -> None:
    older = fenced_producer("import")
    with transaction.atomic():
        send(older, "order-8", at_once=False)
        with pytest.raises(LeftoversUndecided):
            in_thread(lambda: fenced_producer("import", wait_seconds=0.1))
        page = operator.get("/outbox/undecided/").content.decode()
    assert "order-8" in page and "import, epoch 1" in page and "fenced" in page


def test_an_action_is_shown_first_then_done_with_a_reason_and_kept(world: World, operator: Client) -> None:
    given = {"id": str(lost_end(world)), "decision": "commit", "back": "/outbox/undecided/"}
    shown = operator.post("/outbox/act/decide/", given).content.decode()
    assert "are delivered to every group" in shown and "COMMIT" in shown
    assert 'href="/outbox/undecided/"' in shown
    without = operator.post("/outbox/act/decide/", {**given, "confirmed": "yes", "why": " "})
    assert without.status_code == 422 and b"Give a reason" in without.content
    assert decision(world) == [] and not OperatorAction.objects.exists()
    done = operator.post("/outbox/act/decide/", {**given, "confirmed": "yes", "why": "the order is paid"})
    entry = OperatorAction.objects.get()
    assert done["Location"] == f"/outbox/audit/{entry.pk}/"
    assert decision(world) == [("C", "O")]
    assert (entry.action, entry.outcome, entry.why) == ("decide", "done", "the order is paid")
    assert entry.subject == f"transaction {given['id']}" and entry.ended_at is not None
    assert entry.before["decision"] is None and entry.after["decision"] == "C"
    page = operator.get(f"/outbox/messages/{given['id']}/").content.decode()
    assert "decided by an operator" in page and "the order is paid" in page
    assert "the order is paid" in operator.get("/outbox/audit/").content.decode()


def buttons(html: str) -> list[str]:
    main = html.partition("<main")[2]
    return [re.sub(r"<[^>]+>", "", one) for one in re.findall(r"<button[^>]*>(.*?)</button>", main, re.DOTALL)]


def test_a_plan_that_is_refused_says_why_once_and_its_button_needs_a_choice(world: World, operator: Client) -> None:
    """The control is the same transaction while its ledger is one of this project's."""
    transaction_id = str(lost_end(world))
    committed = {"id": transaction_id, "decision": "commit"}
    shown = operator.post("/outbox/act/decide/", committed).content.decode()
    assert "refused" not in shown and buttons(shown) == ["Do it"]
    world.sql("UPDATE outbox.commit_log SET ledger_id = gen_random_uuid()")
    for given in (committed, {**committed, "decision": "rollback"}):
        shown = html.unescape(operator.post("/outbox/act/decide/", given).content.decode())
        said = shown.partition("It is refused now")[2].partition("</div>")[0]
        assert said.count("is not one of this project's ledgers") == 1 and "?." not in said and ".." not in said
        assert shown.partition("It is refused now")[0].count("ledgers") == 0, "once"
        # The button needs a choice of its own.
        assert shown.index("in spite of that") < shown.index("Do it<") and 'name="force" value="yes" required' in shown


def test_asking_a_producer_group_without_a_process_says_that_no_process_answers(world: World, operator: Client) -> None:
    """The control is a pass of check-back that has just run."""
    given = {"ids": str(lost_end(world))}
    shown = html.unescape(operator.post("/outbox/act/ask/", given).content.decode())
    assert "No process answers for producer group" in shown and "has ever run" in shown
    assert "Start a worker with the role check" in shown and "They stay undecided" in shown
    answer = operator.post("/outbox/act/ask/", {**given, "confirmed": "yes", "why": "try"})
    assert "but no process answers" in operator.get(answer["Location"]).content.decode()
    [(group,)] = world.sql("SELECT producer_group FROM outbox.pending_check")
    assert take_turn(world.run, group, CHECK_BACK, interval_seconds=5)
    shown = operator.post("/outbox/act/ask/", given).content.decode()
    assert "No process answers" not in shown and "The next check-back pass" in shown


def test_bodies_need_a_permission_and_are_masked(world: World, operator: Client, outbox_settings: object) -> None:
    address = f"/outbox/messages/{lost_end(world)}/"
    assert "hunter2" in operator.get(address).content.decode()
    assert "hunter2" not in client_of(make_user("view_operations", "act")).get(address).content.decode()
    world.change_settings(MASKED_FIELDS={"orders": ["Password"]})
    page = operator.get(address).content.decode()
    assert "hunter2" not in page and "***" in page and "order-7" in page


def test_actions_that_were_cut_off_or_failed_have_audit_rows(world: World) -> None:
    def refuse() -> dict[str, object]:
        raise UsageError("not like this")

    def crash() -> dict[str, object]:
        assert OperatorAction.objects.get().outcome == "begun"
        raise ZeroDivisionError

    broken = ActionPlan(subject="group g", effect="", before={"paused\0": "\0"}, do=crash)
    with pytest.raises(ZeroDivisionError):
        recorded("pause", broken, who="ada", why="try")
    refused = ActionPlan(subject="g\0", effect="", do=refuse)
    assert recorded("pause", refused, who="ada", why="try").outcome == "failed"
    assert [entry.outcome for entry in OperatorAction.objects.all()] == ["failed", "failed"]


def test_a_transaction_that_may_still_run_cannot_be_decided(world: World, operator: Client) -> None:
    assert take_turn(world.run, "shop", CHECK_BACK, interval_seconds=30)
    with transaction.atomic():
        Order.objects.create(number="order-9")
        transaction_id = publish("orders", {}, key="order-9").transaction_id
        given = {"id": str(transaction_id), "decision": "rollback"}
        forced = {**given, "confirmed": "yes", "why": "a guess", "force": "yes"}
        pages = ("/outbox/undecided/", f"/outbox/messages/{transaction_id}/")
        for reason in (
            "the half scan has not found the transaction",
            "its immunity",
            "the local transaction was still running at the last check",
        ):
            if reason == "its immunity":
                checks.scan(world.run, settings=CheckSettings())
                world.sql("UPDATE outbox.pending_check SET immune_until = now() + interval '1 minute'")
            elif "last check" in reason:
                world.sql("UPDATE outbox.pending_check SET immune_until = now(), due_at = now()")
                assert run_check_back().unknown == 1
            for page in pages:
                text = operator.get(page).content.decode()
                assert "order-9" in text and "may still run" in text and reason in text, page
                assert "Commit …" not in text and "Roll back …" not in text and "Ask again" in text
            refused = operator.post("/outbox/act/decide/", forced)
            assert refused.status_code == 400 and reason in refused.content.decode()
    flush(within_seconds=5)
    assert decision(world) == [("C", "P")] and not OperatorAction.objects.exists()
    assert "order-9" not in operator.get("/outbox/undecided/").content.decode()


def heading(operator: Client, message_id: UUID) -> str:
    page = operator.get(f"/outbox/messages/{message_id}/").content.decode()
    return page.partition('<p class="verdict-line">')[2].partition("</p>")[0]


def test_a_message_is_headed_by_what_became_of_it(world: World, operator: Client) -> None:
    world.subscribe("mail")
    message_id = publish("orders", {}, key="k0", at_once=True).message_id
    sequence()
    assert "waiting" in heading(operator, message_id)
    # The group has gone past it.
    world.sql("INSERT INTO outbox.consumer_offset (group_id, queue_id, epoch, ordinal, next_offset, start_offset)"
              " SELECT group_id, queue_id, 9, 9, queue_offset + 1, 0"
              " FROM outbox.consumer_group, outbox.consume_queue WHERE name = 'mail'")  # fmt: skip
    assert "handled" in heading(operator, message_id)
    bury(world, "mail", "k0", "TimeoutError: no answer")
    assert heading(operator, message_id) == '<span class="badge bad">dead letter</span>'
    world.subscribe("stock")
    assert "dead letter in 1 of 2 groups" in heading(operator, message_id)
    world.sql("UPDATE outbox.dead_letter SET replayed_at = now(), discarded_at = now()")
    world.sql("DELETE FROM outbox.subscription WHERE group_id = (SELECT group_id FROM outbox.consumer_group"
              " WHERE name = 'stock')")  # fmt: skip
    assert "discarded" in heading(operator, message_id)


def test_the_history_of_a_message_is_shown_in_its_order(world: World, operator: Client) -> None:
    world.subscribe("mail")
    message_id = publish("orders", {}, key="k0", at_once=True).message_id
    sequence()
    bury(world, "mail", "k0", "TimeoutError: no answer")
    # As a consumer writes them: the letter's time is that of the transaction's beginning. The producer's clock is fast.
    world.sql("UPDATE outbox.failure SET failed_at = now() + make_interval(secs => 0.01 + attempt)")
    world.sql("UPDATE outbox.dead_letter SET dead_at = now() - interval '2 s'")
    world.sql("UPDATE outbox.commit_log SET born_at = now() + interval '1 hour'")
    page = operator.get(f"/outbox/messages/{message_id}/").content.decode()
    life = page.partition('<ol class="life">')[2].partition("</ol>")[0]
    steps = (
        "Published",
        "Stored with",
        "Committed",
        "Queued",
        "failed on attempt 1",
        "failed on attempt 2",
        "Dead letter of ",
    )
    places = [life.index(step) for step in steps if step in life]
    assert len(places) >= 6 and places == sorted(places), life
    assert "+-" not in life
