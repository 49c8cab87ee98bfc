"""`manage.py outbox_schedule list|pause|resume|run`."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from django.core.management.base import CommandParser

from outbox.broker.database.executor import Executor
from outbox.broker.schedules.schedule import ScheduleRow, list_schedules
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.management.acting import ActionCommand

_UPCOMING = 5


class Command(ActionCommand):
    """Parses the arguments, then calls the function of the chosen subcommand."""

    help = "List, pause, resume or run the schedules on the broker. Workers store the schedules of OUTBOX['SCHEDULES']."

    def add_arguments(self, parser: CommandParser) -> None:
        self.add_json(self.add_subcommands(parser).add_parser("list", help="list the schedules of all services"))

    def _list(self, options: dict[str, Any]) -> None:
        with broker_connection() as (connection, schema):
            found = list_schedules(Executor(connection, schema))
        if options["json"]:
            self.print_json([_as_json(one) for one in found])
            return
        self.print_rows(
            ["schedule", "producer group", "expression", "time zone", "topic", "missed", "last", "next", "state"],
            (
                (
                    one.name,
                    one.producer_group,
                    one.expression,
                    one.timezone,
                    one.topic,
                    one.missed,
                    _local(one, one.last_at),
                    _local(one, one.next_at),
                    one.error or ("paused" if one.paused_at else "active"),
                )
                for one in found
            ),
        )


def _as_json(one: ScheduleRow) -> dict[str, Any]:
    return {
        "name": one.name,
        "producer_group": one.producer_group,
        "expression": one.expression,
        "timezone": one.timezone,
        "topic": one.topic,
        "missed": one.missed,
        "declared_at": one.declared_at.isoformat(),
        "last_at": one.last_at and one.last_at.isoformat(),
        "last_message_id": one.last_message_id and str(one.last_message_id),
        "next": [at.isoformat() for at in one.upcoming(_UPCOMING)],
        "paused_at": one.paused_at and one.paused_at.isoformat(),
        "error": one.error,
    }


def _local(one: ScheduleRow, at: datetime | None) -> str:
    """Return a moment in the time zone of the schedule."""
    if at is None:
        return "-"
    try:
        return at.astimezone(ZoneInfo(one.timezone)).isoformat(sep=" ", timespec="minutes")
    except (KeyError, ValueError, OSError, OverflowError):
        return at.isoformat(sep=" ", timespec="minutes")
