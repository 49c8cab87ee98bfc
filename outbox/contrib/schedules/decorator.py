"""`@scheduled`: declares a schedule, and registers the function that handles its messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from outbox.contrib.django.subscribers.callables import path_of
from outbox.contrib.django.subscribers.registry import Subscriber, subscriber, subscribers
from outbox.contrib.schedules.settings import DeclaredSchedule, read_schedule
from outbox.errors import ConfigurationError

Function = TypeVar("Function", bound=Callable[..., Any])

# The declared schedule and its subscriber, by the name of the schedule.
_scheduled: dict[str, tuple[DeclaredSchedule, Subscriber]] = {}


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
        known = scheduled_functions().get(one)
        if known is not None and known[1] != path_of(function):
            raise ConfigurationError(
                f"the schedule {one!r} is declared by {known[1]} and by {path_of(function)}: give one of them another "
                "name, @scheduled(…, name='…')."
            )
        subscriber(topic, group=group, **options)(function)
        [registered] = [
            item for item in subscribers() if (item.subscription.group, item.subscription.topic) == (group, topic)
        ]
        _scheduled[one] = (declared, registered)
        return function

    return decorate


def scheduled_functions() -> Mapping[str, tuple[DeclaredSchedule, str]]:
    """Return the schedules of `@scheduled` and the paths of their functions, by name."""
    registered = subscribers()
    return {name: (declared, item.name) for name, (declared, item) in _scheduled.items() if item in registered}
