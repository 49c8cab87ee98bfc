"""Actions on schedules: pause, resume, and publish one extra message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from outbox.broker.database.executor import Executor
from outbox.broker.schedules.publishing import publish_now
from outbox.broker.schedules.schedule import ScheduleRow, find_schedule, pause
from outbox.contrib.django.actions.declaration import ActionField, ActionPlan, DeclaredAction, Values
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.engine.broker import get_engine
from outbox.contrib.django.settings.conf import get_settings


def _pause(values: Values) -> ActionPlan:
    row = _found(values)
    return ActionPlan(
        subject=_subject(row),
        effect=f"Pause {_subject(row)}: the leader publishes no message of it until the schedule is resumed.",
        before=_state(row),
        nothing=row.paused_at is not None,
        do=lambda: _set_paused(values, row, paused=True),
    )


_MISSED: Final[Mapping[str, str]] = {
    "coalesce": "If due moments have passed during the pause, the leader publishes one message for the latest of them.",
    "catch_up": "The leader publishes one message for each due moment of the pause.",
    "skip": "The leader publishes no message for due moments that are more than five minutes ago.",
}


def _resume(values: Values) -> ActionPlan:
    row = _found(values)
    return ActionPlan(
        subject=_subject(row),
        effect=f"Resume {_subject(row)}. {_MISSED[row.missed]}",
        before=_state(row),
        nothing=row.paused_at is None,
        do=lambda: _set_paused(values, row, paused=False),
    )


def _set_paused(values: Values, row: ScheduleRow, *, paused: bool) -> Mapping[str, Any]:
    with broker_connection() as (connection, schema):
        pause(Executor(connection, schema), row.producer_group, row.name, paused=paused)
    return _state(_found(values))


def _run(values: Values) -> ActionPlan:
    row = _found(values)

    def do() -> Mapping[str, Any]:
        with broker_connection() as (connection, schema):
            run = Executor(connection, schema)
            message_id = publish_now(run, get_engine().catalog, row.producer_group, row.name)
        return {**_state(_found(values)), "message_id": str(message_id)}

    return ActionPlan(
        subject=_subject(row),
        effect=f"Publish one extra message of {_subject(row)} to topic {row.topic} now. The due moments of the "
        "schedule do not change.",
        before=_state(row),
        do=do,
    )


def _found(values: Values) -> ScheduleRow:
    settings = get_settings()
    group = values["producer_group"] or settings.required_producer_group()
    with broker_connection() as (connection, schema):
        return find_schedule(Executor(connection, schema), group, values["schedule"])


def _subject(row: ScheduleRow) -> str:
    return f"schedule {row.name} of producer group {row.producer_group}"


def _state(row: ScheduleRow) -> dict[str, Any]:
    return {"paused": row.paused_at is not None}


_FIELDS: Final = (
    ActionField(name="schedule", required=True, positional=True, help="schedule"),
    ActionField(name="producer_group", help="the service of the schedule (default: OUTBOX['PRODUCER_GROUP'])"),
)

ACTIONS: Final = (
    DeclaredAction(
        name="pause_schedule",
        title="Pause a schedule",
        command="outbox_schedule pause",
        fields=_FIELDS,
        plan=_pause,
    ),
    DeclaredAction(
        name="resume_schedule",
        title="Resume a schedule",
        command="outbox_schedule resume",
        fields=_FIELDS,
        plan=_resume,
    ),
    DeclaredAction(
        name="run_schedule",
        title="Publish one extra message of a schedule now",
        command="outbox_schedule run",
        fields=_FIELDS,
        plan=_run,
    ),
)
