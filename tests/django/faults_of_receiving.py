"""The fault of receiving, made for real; it is named as its condition."""

from __future__ import annotations

from outbox.contrib.receiving.running import ReceiverHeartbeat
from tests.django.broker_world import World, fault


@fault("critical")
def receiver_late(world: World) -> None:
    """A receiver is stopped, or its source does not answer."""
    ReceiverHeartbeat("partner").note()
    world.sql("UPDATE outbox.periodic_pass SET began_at = began_at - interval '5 minutes'")
