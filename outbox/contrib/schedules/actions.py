"""Actions on schedules (pause, resume, publish one extra message), and the list of all schedules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from zoneinfo import ZoneInfo

from django.utils.safestring import mark_safe

from outbox.broker.database.executor import Executor
from outbox.contrib.django.actions.cells import badge, code, error, joined, link, span, topic_link
from outbox.contrib.django.actions.declaration import ActionPlan, Button, Field, Values, action, argument
from outbox.contrib.django.actions.listing import COMMAND, PAGE, Asked, Column, Listing, States
from outbox.contrib.django.database.aliases import broker_executor
from outbox.contrib.django.engine.broker import get_engine
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.schedules.publishing import publish_now
from outbox.contrib.schedules.schedule import ScheduleRow, clock, find_schedule, list_schedules, pause

_FIELDS: Final = (
    argument("schedule", "schedule"),
    Field("producer_group", "the service of the schedule (default: OUTBOX['PRODUCER_GROUP'])"),
)


def _button(label: str, row: ScheduleRow, tone: str = "plain") -> Button:
    return Button(label, tone, {"schedule": row.name, "producer_group": row.producer_group})


@action(
    "pause_schedule",
    "Pause a schedule",
    "outbox_schedule pause",
    *_FIELDS,
    buttons={"schedules": lambda one: [_button("Pause …", one.row)] if one.row.paused_at is None else []},
)
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


@action(
    "resume_schedule",
    "Resume a schedule",
    "outbox_schedule resume",
    *_FIELDS,
    buttons={"schedules": lambda one: [_button("Resume …", one.row, "good")] if one.row.paused_at else []},
)
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
    with broker_executor() as run:
        pause(run, row.producer_group, row.name, paused=paused)
    return _state(_found(values))


@action(
    "run_schedule",
    "Publish one extra message of a schedule now",
    "outbox_schedule run",
    *_FIELDS,
    buttons={"schedules": lambda one: [_button("Run now …", one.row)]},
)
def _run(values: Values) -> ActionPlan:
    row = _found(values)

    def do() -> Mapping[str, Any]:
        with broker_executor() as run:
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
    with broker_executor() as run:
        return find_schedule(run, group, values["schedule"])


def _subject(row: ScheduleRow) -> str:
    return f"schedule {row.name} of producer group {row.producer_group}"


def _state(row: ScheduleRow) -> dict[str, Any]:
    return {"paused": row.paused_at is not None}


# -- the list -------------------------------------------------------------------------------------------

_UPCOMING: Final = 5
_LATE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class _Listed:
    """A schedule, and for how long its due moment has no message."""

    row: ScheduleRow
    late_seconds: float

    @property
    def is_late(self) -> bool:
        return self.row.paused_at is None and self.late_seconds > _LATE_SECONDS


def _read(run: Executor, asked: Asked) -> list[_Listed]:
    now = clock(run)
    return [_Listed(one, one.late_seconds(now)) for one in list_schedules(run)]


def _as_json(one: _Listed) -> Mapping[str, object]:
    row = one.row
    names = ("name", "producer_group", "expression", "timezone", "topic", "missed")
    return {
        **{name: getattr(row, name) for name in names},
        "declared_at": row.declared_at.isoformat(),
        "last_at": row.last_at and row.last_at.isoformat(),
        "last_message_id": row.last_message_id and str(row.last_message_id),
        "next": [at.isoformat() for at in row.upcoming(_UPCOMING)],
        "paused_at": row.paused_at and row.paused_at.isoformat(),
        "error": row.error,
    }


def _last(one: _Listed) -> list[object]:
    row = one.row
    return [row.last_at, *([link("last message", "message", row.last_message_id)] if row.last_message_id else [])]


def _local(row: ScheduleRow, at: datetime | None) -> str | None:
    """A moment in the time zone of the schedule."""
    if at is None:
        return None
    try:
        return at.astimezone(ZoneInfo(row.timezone)).isoformat(sep=" ", timespec="minutes")
    except (KeyError, ValueError, OSError, OverflowError):
        return at.isoformat(sep=" ", timespec="minutes")


def _shown_state(one: _Listed) -> list[object]:
    if one.row.paused_at is not None:
        return [badge("paused", "warn")]
    if one.row.error:
        return [badge("fails", "bad"), error(one.row.error)]
    return [badge("late", "bad"), span(one.late_seconds)] if one.is_late else [badge("active", "good")]


_STATES: Final[States] = {
    "": ("All", lambda one: True),
    "paused": ("Paused", lambda one: one.row.paused_at is not None),
    "failing": ("Failing", lambda one: bool(one.row.error)),
    "late": ("Late", lambda one: one.is_late),
}
SCHEDULES: Final = Listing(
    "schedules",
    (
        Column("Schedule", lambda one: one.row.name, "head"),
        Column("Service", lambda one: one.row.producer_group),
        Column("Expression", lambda one: [code(one.row.expression), one.row.timezone]),
        Column("Topic", lambda one: topic_link(one.row.topic)),
        Column("Missed", lambda one: one.row.missed, on=COMMAND),
        Column("Last", _last, on=PAGE),
        Column("Last", lambda one: _local(one.row, one.row.last_at), on=COMMAND),
        Column(
            "Next",
            lambda one: None if one.row.paused_at else joined(one.row.upcoming(_UPCOMING), mark_safe("<br>")),
            on=PAGE,
        ),
        Column("Next", lambda one: _local(one.row, one.row.next_at), on=COMMAND),
        Column("State", _shown_state),
    ),
    _read,
    command="outbox_schedule list",
    help="list the schedules of all services",
    states=_STATES,
    json=_as_json,
    address="schedules/",
    title="Schedules",
    menu=("Messages", "Schedules"),
    caption="Schedules",
    empty="No schedule is in this state.",
    unused="No service on this broker declares a schedule.",
    key=lambda one: f"{one.row.producer_group} {one.row.name}",
)
