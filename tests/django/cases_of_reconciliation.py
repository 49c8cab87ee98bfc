"""The actions on findings, for test_actions.py."""

from __future__ import annotations

from outbox.contrib.reconciliation.models import SavedReconciliation
from tests.django.broker_world import World
from tests.django.repairs import lost, save_finding
from tests.django.shop.models import Order
from tests.django.test_actions import Given, case, rows


@case("repair", rows("SELECT key FROM outbox.message_v1 WHERE state = 'committed'"))
def _repair(world: World) -> Given:
    world.change_settings(REPAIR_PUBLISHERS={"orders": "tests.django.repair_publisher.order"})
    Order.objects.all().delete()
    Order.objects.create(number="7", status="new")
    return {"finding": str(save_finding(lost("7")).pk)}


@case("forget_findings", lambda _: SavedReconciliation.objects.count())
def _forget_findings(world: World) -> Given:
    save_finding(lost("7"))
    return {"output": "orders"}
