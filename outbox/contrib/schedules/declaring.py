"""The schedules of a service: from OUTBOX['SCHEDULES'] to the rows of the broker.

A worker stores the declarations at its start and once a minute (`declare_schedules`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from django.core.checks import CheckMessage, Error

from outbox.contrib.django.database.aliases import broker_executor
from outbox.contrib.django.engine.broker import engine_of
from outbox.contrib.django.settings.conf import OutboxSettings, get_settings, settings_of
from outbox.contrib.schedules.schedule import Schedule, declare
from outbox.contrib.schedules.settings import DeclaredSchedule, ScheduleSettings
from outbox.errors import ConfigurationError, OutboxError
from outbox.utils.safe_text import shown_text


def declared_schedules(settings: OutboxSettings) -> list[Schedule]:
    """Return the schedules that this project declares, with encoded bodies.

    Raises ConfigurationError or UnserialisableBody.
    """
    return [_schedule(settings, name, one) for name, one in settings_of(ScheduleSettings).schedules.items()]


def declare_schedules() -> Mapping[str, Any]:
    """Store the schedules of this project on the broker, and return the counts. Raises OutboxError."""
    settings = get_settings()
    if not settings.has_database or not settings.producer_group:
        if problem := next(schedule_problems(settings), ""):
            raise ConfigurationError(problem)
        return {}
    group = settings.required_producer_group()
    wanted = declared_schedules(settings)
    with broker_executor() as run:
        return asdict(declare(run, group, wanted))


def check_schedules(**options: Any) -> list[CheckMessage]:
    """Report each schedule that the leader could not publish, for `manage.py check`."""
    try:
        return [Error(text, id="outbox.E038") for text in schedule_problems(get_settings())]
    except ConfigurationError:
        # The core's check reports wrong settings.
        return []


def schedule_problems(settings: OutboxSettings) -> Iterator[str]:
    """Yield a text for each schedule that the leader could not publish."""
    declared = settings_of(ScheduleSettings).schedules
    if declared and not settings.has_database and not settings.in_memory:
        yield (
            f"the schedules {', '.join(map(repr, declared))} are published by the leader of the bundled broker, and "
            "OUTBOX['BROKER'] is the address of another one, which has no such leader: call publish() in a task of "
            "Celery beat instead, or keep the topics of the schedules on PostgreSQL."
        )
        return
    if declared and not settings.producer_group:
        yield (
            f"the schedules {', '.join(declared)} need OUTBOX['PRODUCER_GROUP']: the names of schedules are unique in "
            "a producer group. Set a name that no other service on the same broker uses, for example 'orders'."
        )
        return
    for name, one in declared.items():
        known = settings.topics.get(one.topic)
        if known is None:
            yield (
                f"the schedule {name!r} publishes to the topic {one.topic!r}, which OUTBOX['TOPICS'] does not declare. "
                "Declare the topic, and run `manage.py migrate`."
            )
            continue
        try:
            message = _schedule(settings, name, one).message(datetime.now(UTC))
            known.topic.check_accepts(message, transactional=None)
        except OutboxError as error:
            yield f"the schedule {name!r} cannot be published: {shown_text(error)}"


def _schedule(settings: OutboxSettings, name: str, one: DeclaredSchedule) -> Schedule:
    body, content_type = engine_of(settings).codecs.encode(one.topic, one.body)
    return Schedule(
        producer_group=settings.producer_group,
        name=name,
        expression=one.cron,
        timezone=one.timezone,
        topic=one.topic,
        missed=one.missed,
        content_type=content_type,
        body=body,
    )
