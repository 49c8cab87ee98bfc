"""The fault of the condition of schedules."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from outbox.broker.log.topics import TopicCatalog
from outbox.contrib.schedules.publishing import run_once
from outbox.contrib.schedules.schedule import Schedule, declare
from tests.django.broker_world import World, fault


@fault("critical")
def schedule_late(world: World) -> None:
    """The topic of a schedule does not exist, or the leader cannot publish."""
    late = Schedule(producer_group="shop", name="report", topic="missing", expression="0 * * * *")
    declare(world.run, "shop", [late], now=datetime.now(UTC) - timedelta(hours=2))
    run_once(world.run, TopicCatalog())
