"""The fault of the condition of events."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from outbox import Delivery
from outbox.contrib.django import publish, subscriber
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.events import declaration, event
from tests.django.broker_world import World, fault
from tests.django.support import sequence
from tests.support import eventually


@dataclass
class Known:
    """What the workers know of the event `known`."""


@fault("warning")
def unknown_version(world: World) -> None:
    """Newer code than that of the workers publishes an event."""
    world.stack.enter_context(declaration.restored())
    event("known", topic="orders")(Known)

    @subscriber("orders", group="effects")
    def effect(delivery: Delivery[Known]) -> None:
        pass

    publish("orders", {}, headers={"outbox-event": "known", "outbox-event-version": "2"}, at_once=True)
    sequence()
    stop = threading.Event()
    thread = threading.Thread(target=consumer_runtime(groups=["effects"]).run, args=[stop])
    thread.start()
    world.stack.callback(thread.join, 20)
    world.stack.callback(stop.set)
    eventually(lambda: world.sql("SELECT 1 FROM outbox.unknown_version"), within_seconds=60, what="the wait")
