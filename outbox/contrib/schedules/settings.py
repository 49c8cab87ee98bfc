"""The setting SCHEDULES, and the options of a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outbox.contrib.django.settings.definition import (
    Rule,
    any_text,
    entries,
    group,
    member,
    read,
    required,
    setting,
    text,
)
from outbox.contrib.schedules.cron import Cron
from outbox.contrib.schedules.schedule import Missed
from outbox.errors import ConfigurationError


def _cron(where: str, value: Any) -> str:
    try:
        return Cron(any_text.check(where, value), "UTC").expression
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from error


def _timezone(where: str, value: Any) -> str:
    try:
        return Cron("0 0 * * *", any_text.check(where, value)).timezone
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class DeclaredSchedule:
    """One entry of SCHEDULES."""

    cron: str = required(
        Rule("cron expression", _cron),
        meaning="minute, hour, day of month, month and day of week, as in [cron](#expressions)",
    )
    topic: str = required(
        text("topic"), meaning="the topic that gets the messages; declare it in `TOPICS`. FIFO topics are refused"
    )
    timezone: str = setting(
        "UTC",
        Rule("IANA name of a time zone", _timezone),
        meaning="the time zone of the expression, for example `Europe/Berlin`",
    )
    body: Any = setting(
        {},
        Rule("a value that the topic's codec encodes", lambda where, value: value),
        meaning="the body of each message",
    )
    missed: Missed = setting(
        Missed.COALESCE,
        member(Missed),
        shown='`"coalesce"`',
        meaning="what is published after a pause, or after a time without a leader "
        "([missed due moments](#missed-due-moments))",
    )


def _entry(where: str, name: str, given: object) -> DeclaredSchedule:
    group.check(where, name)
    return read(DeclaredSchedule, where, given)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleSettings:
    """The keys of OUTBOX that are about schedules."""

    schedules: Mapping[str, DeclaredSchedule] = setting(
        {},
        entries(_entry, name="name", example="{name: {'cron': '0 3 * * *', 'topic': …}}"),
        bundled_only=True,
        meaning="the [schedules](schedules.md) by which the leader publishes messages",
        section="broker",
    )
