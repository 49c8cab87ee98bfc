"""The fault of the condition of blocked keys."""

from __future__ import annotations

from outbox import Delivery
from outbox.contrib.blocked_keys import BlockKey
from outbox.contrib.django import publish, subscriber
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.errors import PermanentError
from tests.django.broker_world import World, fault
from tests.django.support import sequence


def block_a_key() -> None:
    """One message of a key is a dead letter, and the next one waits."""

    @subscriber("steps", group="effects", mode="key_ordered", options=[BlockKey()])
    def effect(delivery: Delivery) -> None:
        raise PermanentError("cannot ever work")

    for _ in range(2):
        publish("steps", {}, key="k", at_once=True)
    sequence()
    consumer_runtime(groups=["effects"]).run_once()


@fault("warning")
def blocked_key(world: World) -> None:
    """A handler fails for good on a message, and later messages of its key wait."""
    world.limits(BLOCKED_KEY_SECONDS=[0, None])
    block_a_key()
