"""One message is delivered again to one group: its effect happens once, and every message is still counted once."""

from __future__ import annotations

from io import StringIO
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connections, transaction
from django.urls import reverse

from outbox import Delivery, Message
from outbox.broker.operations.audit import count_messages
from outbox.contrib.django import message, publish, publish_messages, subscriber
from outbox.contrib.django.database.aliases import broker_connection, on_broker
from outbox.contrib.django.models import InboxEntry
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.errors import PermanentError
from tests.django.operators import ALL, client_of, make_user
from tests.django.shop.models import Effect
from tests.django.support import call, sequence
from tests.part_apps import has

pytestmark = [pytest.mark.usefixtures("databases", "no_subscribers", "no_events"), pytest.mark.timeout(180)]


def subscribe(*groups: str) -> None:
    for group in groups:

        @subscriber("orders", group=group)
        def effect(delivery: Delivery, group: str = group) -> None:
            Effect.objects.create(number=f"{group} {delivery.key}")

    consumer_runtime().run_once()


def consume() -> None:
    """As often as a second delivery, if there were one, would need to come through."""
    for _ in range(3):
        sequence()
        consumer_runtime().run_once()


def redeliver(message_id: UUID, group: str, *options: str) -> str:
    return call("outbox_message", "redeliver", str(message_id), "--group", group, "--no-input", *options)


def effects() -> list[str]:
    return sorted(Effect.objects.values_list("number", flat=True))


def counted(group: str) -> dict[str, int]:
    """The group's terms; every equation holds."""
    counts = on_broker(count_messages)
    assert counts.differences() == []
    found = counts.groups[group]
    return {name: getattr(found, name) for name in ("queued", "handled", "retrying", "dead", "discarded")}


def test_a_missing_effect_is_made_again_for_one_group_whether_its_inbox_row_is_there_or_not() -> None:
    subscribe("effects", "others")
    first, second, _ = [publish("orders", {}, key=key, at_once=True).message_id for key in "123"]
    consume()
    every = [f"{group} {key}" for group in ("effects", "others") for key in "123"]
    assert effects() == every
    assert counted("effects") == {"queued": 3, "handled": 3, "retrying": 0, "dead": 0, "discarded": 0}

    assert "Nothing was changed" in redeliver(first, "effects", "--dry-run")
    consume()
    assert effects() == every

    Effect.objects.filter(number__in=["effects 1", "effects 2"]).delete()
    InboxEntry.objects.filter(group="effects", message_id=second).delete()
    for message_id in (first, second):
        assert "Done." in redeliver(message_id, "effects")
    assert counted("effects") == {"queued": 5, "handled": 3, "retrying": 2, "dead": 0, "discarded": 0}
    with pytest.raises(CommandError, match="still gets it"):
        redeliver(first, "effects")
    consume()
    assert effects() == every
    assert counted("effects") == {"queued": 5, "handled": 5, "retrying": 0, "dead": 0, "discarded": 0}
    assert counted("others")["handled"] == 3
    assert InboxEntry.objects.filter(group="effects").count() == 3

    # Also a second time, after the redelivered entry has passed.
    Effect.objects.filter(number="effects 1").delete()
    redeliver(first, "effects")
    consume()
    assert effects() == every
    assert counted("effects")["handled"] == 6


def test_a_message_that_the_group_has_not_passed_is_refused_and_a_discarded_one_is_delivered() -> None:
    mended: list[bool] = []

    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        if not mended:
            raise PermanentError("not yet")
        Effect.objects.create(number=f"effects {delivery.key}")

    consumer_runtime().run_once()
    dead = publish("orders", {}, key="1", at_once=True).message_id
    with pytest.raises(CommandError, match="no queue of this group has it"):
        redeliver(uuid4(), "effects")
    sequence()
    with pytest.raises(CommandError, match="still gets it"):
        redeliver(dead, "effects")
    consume()
    with pytest.raises(CommandError, match="outbox_dead_letter replay"):
        redeliver(dead, "effects")
    call_command("outbox_dead_letter", "discard", "effects", str(dead), "--no-input", stdout=StringIO())
    mended.append(True)
    redeliver(dead, "effects")
    assert counted("effects") == {"queued": 2, "handled": 0, "retrying": 1, "dead": 0, "discarded": 1}
    consume()
    assert effects() == ["effects 1"]
    assert counted("effects") == {"queued": 2, "handled": 1, "retrying": 0, "dead": 0, "discarded": 1}


@pytest.mark.skipif(not has("console"), reason="a part that is not there")
def test_the_page_of_a_message_offers_it_for_the_groups_that_have_passed_it() -> None:
    subscribe("effects")
    one = publish("orders", {}, key="1", at_once=True).message_id
    address = reverse("outbox:message", args=[one])
    client = client_of(make_user(*ALL))
    sequence()
    assert b"Deliver again to" not in client.get(address).content
    consume()
    assert b"Deliver again to effects" in client.get(address).content


def test_a_transaction_of_several_messages_is_decided_by_the_id_of_any_of_them() -> None:
    def undecided() -> list[UUID]:
        stored: list[Message] = [message("orders", {}, key=key) for key in "12"]
        with transaction.atomic():
            publish_messages(stored)
            connections["default"].run_on_commit.clear()
        return [one.message_id for one in stored]

    def outcome() -> list[Any]:
        with broker_connection() as (connection, _):
            rows = connection.execute("SELECT decision::text, cardinality(log_ids) FROM outbox.op_log").fetchall()
            connection.execute("DELETE FROM outbox.op_log")
            connection.execute("DELETE FROM outbox.pending_check")
        return rows

    for number in (0, 1):
        ids = undecided()
        call_command("outbox_transaction", "ask", str(ids[number]), "--dry-run", stdout=StringIO())
        call_command("outbox_transaction", "decide", str(ids[number]), "commit", "--force", "--running",
                     "--no-input", stdout=StringIO())  # fmt: skip
        assert outcome() == [("C", 2)]
