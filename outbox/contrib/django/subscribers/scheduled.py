"""`@scheduled`: declares a schedule, and registers the function that handles its messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from outbox.contrib.django.settings.conf import DeclaredSchedule, read_schedule
from outbox.contrib.django.subscribers.callables import path_of
from outbox.contrib.django.subscribers.registry import subscriber
from outbox.errors import ConfigurationError

Function = TypeVar("Function", bound=Callable[..., Any])

# The declared schedule and the path of its function, by the name of the schedule.
_scheduled: dict[str, tuple[DeclaredSchedule, str]] = {}


def scheduled(
    expression: str,
    *,
    topic: str,
    group: str,
    timezone: str = "UTC",
    name: str | None = None,
    missed: str = "coalesce",
    body: Any = None,
    **options: Any,
) -> Callable[[Function], Function]:
    """Publish a message to a topic by a cron expression, and handle the messages of this topic with the function.

    The function is a subscriber of `topic` for the consumer group `group`: it gets a `Delivery`. `options` are the
    other options of `@subscriber`. The leader publishes a message at each due moment of `expression` in `timezone` (an
    IANA name). The header `outbox-scheduled-for` of the message has the due moment. `body` is the body of each message,
    by default `{}`. `name` is the name of the schedule, by default the name of the function. `missed` says what happens
    after a time without a leader, or after a pause: 'coalesce', 'catch_up' or 'skip'.

    Put the function into the module `subscribers` of an installed app. Declare the topic in OUTBOX['TOPICS']. Raises
    ConfigurationError for a wrong value, or for a name that another function has. Also raises the errors of
    `@subscriber`.
    """
    given = {"cron": expression, "topic": topic, "timezone": timezone, "missed": missed}

    def decorate(function: Function) -> Function:
        one = name or function.__name__
        declared = read_schedule(
            f"@scheduled of {path_of(function)}", one, {**given, **({} if body is None else {"body": body})}
        )
        known = _scheduled.get(one)
        if known is not None and known[1] != path_of(function):
            raise ConfigurationError(
                f"the schedule {one!r} is declared by {known[1]} and by {path_of(function)}: give one of them another "
                "name, @scheduled(…, name='…')."
            )
        subscriber(topic, group=group, **options)(function)
        _scheduled[one] = (declared, path_of(function))
        return function

    return decorate


def scheduled_functions() -> Mapping[str, tuple[DeclaredSchedule, str]]:
    """Return the schedules of `@scheduled` and the paths of their functions, by name."""
    return dict(_scheduled)


def forget_scheduled() -> None:
    """Remove all schedules of `@scheduled`, for tests."""
    _scheduled.clear()
