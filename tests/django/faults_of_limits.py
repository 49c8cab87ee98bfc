"""The fault of the condition of limits."""

from __future__ import annotations

import threading

from outbox import Delivery
from outbox.contrib.django import subscriber
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.contrib.limits import Limits
from tests.django.broker_world import World, fault
from tests.support import eventually


@fault("warning")
def limit_binding(world: World) -> None:
    """A limit is too low for the messages of a subscription."""
    world.limits(LIMIT_SECONDS=[0.5, None])

    @subscriber("orders", group="effects", options=[Limits(rate="1/h")])
    def effect(delivery: Delivery) -> None:
        pass

    world.publish(8)
    stop = threading.Event()
    thread = threading.Thread(target=consumer_runtime(groups=["effects"]).run, args=[stop])
    thread.start()
    world.stack.callback(thread.join, 20)
    world.stack.callback(stop.set)
    waiting = "SELECT 1 FROM outbox.slot_demand WHERE waiting_since < clock_timestamp() - interval '1 second'"
    eventually(lambda: world.sql(waiting), within_seconds=60, what="messages that wait for the limit")
