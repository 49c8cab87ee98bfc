"""The action on limits, for test_actions.py."""

from __future__ import annotations

from outbox.broker.groups.registration import register
from outbox.contrib.limits import Limits
from outbox.subscription import Subscription
from tests.django.broker_world import World
from tests.django.test_actions import Given, case, rows


@case("limits", rows("SELECT declared, override FROM outbox.subscription_limit"))
def _limits(world: World) -> Given:
    register(world.run, Subscription(topic="orders", group="mail", options=[Limits(running=20, rate="100/min")]))
    return {"group": "mail", "topic": "orders", "running": "5"}
