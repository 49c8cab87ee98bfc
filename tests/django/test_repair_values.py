"""The values of a row and of the message that a repair makes from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from outbox.contrib.django import message
from outbox.contrib.django.catalogue import ACTIONS
from outbox.contrib.django.database.aliases import broker_connection
from outbox.message import Message
from tests.django.large_storage import large_bodies, objects, referred, remove_a_year_later
from tests.django.repairs import AT, Repair, finding, lost, save_finding
from tests.django.shop.models import Order
from tests.django.state import stored
from tests.django.test_repair import undecided

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers", "no_events")
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
    repair = Repair(tmp_path, publisher="orders=tests.django.test_repair_values.wide")
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
    repair = Repair(tmp_path, publisher="orders=tests.django.test_repair_values.wide")
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
    repair = Repair(tmp_path, publisher="orders=tests.django.test_repair_values.large")
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
