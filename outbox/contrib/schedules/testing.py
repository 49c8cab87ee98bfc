"""For tests of an application: publish the message of a schedule.

with in_memory_broker() as outbox:
    run_schedule("nightly_report")
    outbox.drain()
"""

from __future__ import annotations

from datetime import UTC, datetime

from outbox.contrib.django.engine.broker import get_broker
from outbox.contrib.django.settings.conf import chosen, get_settings
from outbox.contrib.schedules.declaring import declared_schedules
from outbox.message import Message
from outbox.utils.ids import uuid7


def run_schedule(name: str) -> Message:
    """Publish one message of a declared schedule now, and return the message. `drain` then runs its subscribers.

    In a test no leader runs, so no schedule is due by itself. Raises ConfigurationError for an unknown name.
    """
    declared = {one.name: one for one in declared_schedules(get_settings())}
    message = chosen("OUTBOX['SCHEDULES']", declared, [name], "to run")[name].message(datetime.now(UTC), uuid7())
    get_broker().send([message], committed=True)
    return message
