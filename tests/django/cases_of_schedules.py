"""The actions on schedules, for test_actions.py."""

from __future__ import annotations

from outbox.contrib.schedules.schedule import Schedule, declare, pause
from tests.django.broker_world import World
from tests.django.test_actions import Given, case, rows


def schedule(world: World) -> Given:
    hourly = Schedule(producer_group="shop", name="report", topic="orders", expression="0 * * * *")
    declare(world.run, "shop", [hourly])
    return {"schedule": "report"}


PAUSED = rows("SELECT name, paused_at IS NOT NULL FROM outbox.schedule")


@case("pause_schedule", PAUSED)
def _pause_schedule(world: World) -> Given:
    return schedule(world)


@case("resume_schedule", PAUSED)
def _resume_schedule(world: World) -> Given:
    given = schedule(world)
    pause(world.run, "shop", "report", paused=True)
    return given


@case("run_schedule", rows("SELECT headers ->> 'outbox-schedule', producer_group FROM outbox.commit_log"))
def _run_schedule(world: World) -> Given:
    return schedule(world)
