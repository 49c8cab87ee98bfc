"""Undecided transactions on the page: found, understood, settled; with what is written to the audit."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest
from django.db import transaction
from django.test import Client

from outbox.contrib.django import fenced_producer, publish, run_check_back
from outbox.contrib.django.console.audit import recorded
from outbox.contrib.django.engine.broker import flusher
from outbox.contrib.django.models import OperatorAction
from outbox.errors import LeftoversUndecided, UsageError
from tests.django.broker_world import World
from tests.django.console.support import client_of, make_user
from tests.django.shop.models import Order
from tests.django.support import sequence
from tests.django.test_message_transactions import in_thread, send

pytestmark = pytest.mark.usefixtures("no_subscribers")


def lost_end(world: World, key: str = "order-7") -> UUID:
    """A committed transaction whose end nobody sent: undecided until somebody asks the ledger."""
    with transaction.atomic():
        Order.objects.create(number=key)
        receipt = publish("orders", {"number": key, "password": "hunter2"}, key=key)
    flusher.flush(within_seconds=5)
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
    page = operator.get("/outbox/undecided/").content.decode()
    assert f"/outbox/messages/{transaction_id}/" in page and "order-7" in page
    assert "Commit …" in page and "Ask again" in page
    reader = client_of(make_user("view_operations")).get("/outbox/undecided/").content.decode()
    assert str(transaction_id) in reader and "Commit …" not in reader
    assert str(transaction_id) not in operator.get("/outbox/undecided/?parked=yes").content.decode()


def test_an_open_transaction_of_a_fenced_producer_is_listed_before_anybody_asked(
    world: World, operator: Client
) -> None:
    older = fenced_producer("import")
    with transaction.atomic():
        send(older, "order-8")
        with pytest.raises(LeftoversUndecided):
            in_thread(lambda: fenced_producer("import", wait_seconds=0.1))
        page = operator.get("/outbox/undecided/").content.decode()
    assert "order-8" in page and "import, epoch 1" in page and "fenced" in page


def test_an_action_is_shown_first_then_done_with_a_reason_and_kept(world: World, operator: Client) -> None:
    given = {"transaction": str(lost_end(world)), "decision": "commit", "back": "/outbox/undecided/"}
    shown = operator.post("/outbox/act/decide/", given).content.decode()
    assert "Its messages are delivered to every group" in shown and "COMMIT" in shown
    assert 'href="/outbox/undecided/"' in shown
    without = operator.post("/outbox/act/decide/", {**given, "confirmed": "yes", "why": " "})
    assert without.status_code == 422 and b"Say why" in without.content
    assert decision(world) == [] and not OperatorAction.objects.exists()
    done = operator.post("/outbox/act/decide/", {**given, "confirmed": "yes", "why": "the order is paid"})
    entry = OperatorAction.objects.get()
    assert done["Location"] == f"/outbox/audit/{entry.pk}/"
    assert decision(world) == [("C", "O")]
    assert (entry.action, entry.outcome, entry.why) == ("decide", "done", "the order is paid")
    assert entry.subject == f"transaction {given['transaction']}" and entry.ended_at is not None
    assert entry.before["decision"] is None and entry.after["decision"] == "C"
    page = operator.get(f"/outbox/messages/{given['transaction']}/").content.decode()
    assert "decided by an operator" in page and "the order is paid" in page
    assert "the order is paid" in operator.get("/outbox/audit/").content.decode()


def test_the_ledger_has_the_last_word_unless_it_is_forced(world: World, operator: Client) -> None:
    given = {"transaction": str(lost_end(world)), "decision": "rollback", "confirmed": "yes", "why": "a guess"}
    operator.post("/outbox/act/decide/", given)
    entry = OperatorAction.objects.get()
    assert entry.outcome == "failed" and "not what the ledger proves" in entry.after["error"]
    assert decision(world) == []
    operator.post("/outbox/act/decide/", {**given, "force": "yes"})
    assert decision(world) == [("R", "O")]
    assert OperatorAction.objects.latest("id").after["without_ledger"] is True


def test_asking_again_makes_the_check_due(world: World, operator: Client) -> None:
    transaction_id = lost_end(world)
    world.sql("UPDATE outbox.pending_check SET due_at = now() + interval '1 hour'")
    assert run_check_back().committed == 0
    given = {"transaction": str(transaction_id), "confirmed": "yes", "why": "the database is back"}
    operator.post("/outbox/act/ask/", given)
    assert run_check_back().committed == 1
    assert decision(world) == [("C", "K")]
    again = operator.post("/outbox/act/ask/", given)
    assert again.status_code == 400 and b"decided already" in again.content


def test_a_message_shows_its_whole_life(world: World, operator: Client) -> None:
    transaction_id = lost_end(world)
    page = operator.get(f"/outbox/messages/{transaction_id}/").content.decode()
    assert "Why it is undecided" in page and "nobody of its producer group has been asked" in page
    world.subscribe("effects")
    run_check_back()
    sequence()
    page = operator.get(f"/outbox/messages/{transaction_id}/").content.decode()
    for event in ("Published", "Stored as a half message", "Committed", "decided by check-back", "Queued", "effects"):
        assert event in page
    assert operator.get(f"/outbox/messages/{uuid4()}/").status_code == 404


def test_bodies_are_for_who_may_see_them_and_masked(world: World, operator: Client, outbox_settings: object) -> None:
    address = f"/outbox/messages/{lost_end(world)}/"
    assert "hunter2" in operator.get(address).content.decode()
    assert "hunter2" not in client_of(make_user("view_operations", "act")).get(address).content.decode()
    world.change_settings(MASKED_FIELDS={"orders": ["Password"]})
    page = operator.get(address).content.decode()
    assert "hunter2" not in page and "***" in page and "order-7" in page


def test_what_was_cut_off_or_broken_stands_in_the_audit(world: World) -> None:
    def refuse() -> dict[str, object]:
        raise UsageError("not like this")

    def crash() -> dict[str, object]:
        assert OperatorAction.objects.get().outcome == "begun"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        recorded("ada", "try", "pause", subject="group g", effect="", before={"paused\0": "\0"}, do=crash)
    assert recorded("ada", "try", "pause", subject="g\0", effect="", before={}, do=refuse).outcome == "failed"
    assert [entry.outcome for entry in OperatorAction.objects.all()] == ["failed", "failed"]
