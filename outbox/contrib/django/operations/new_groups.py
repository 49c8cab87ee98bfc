"""Finds consumer groups that are new to a topic whose messages other groups have handled.

Such a group is either new, or a renamed one that would handle the messages again.

See decision 178.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

from outbox.broker.database.executor import Executor
from outbox.broker.operations.newcomers import Newcomer, newcomers
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.subscribers.registry import autodiscover
from outbox.errors import OutboxError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NewGroup:
    """The effect of starting a worker, and the next step if it is not intended."""

    group: str
    text: str
    hint: str


def new_groups(run: Executor) -> list[NewGroup]:
    """The project's groups without a `start` that would begin with messages that other groups have handled.

    Raises what `autodiscover` raises.
    """
    known = autodiscover()
    wanted = [
        (item.subscription.group, item.subscription.topic)
        for item in known
        if not (item.names_start or item.subscription.broadcast)
    ]
    forwarded = get_settings().forward
    wanted += [
        (group, topic) for group, declared in forwarded.items() if declared.start is None for topic in declared.topics
    ]
    of_project = {*(item.subscription.group for item in known), *forwarded}
    return [_said(one, of_project) for one in newcomers(run, wanted)]


def warn_of_new_groups(groups: Collection[str]) -> None:
    """Log them when a worker of these groups starts. An unreachable broker is handled elsewhere."""
    try:
        with broker_connection() as (connection, schema):
            found = new_groups(Executor(connection, schema))
    except OutboxError as error:
        logger.debug("new groups cannot be determined: %s", error)
        return
    for one in found:
        if one.group in groups:
            logger.warning("%s %s", one.text, one.hint)


def _said(one: Newcomer, of_project: Collection[str]) -> NewGroup:
    text = (
        f"the group {one.group!r} is new to the topic {one.topic!r} and begins with the oldest of about "
        f"{one.messages} messages there, which {', '.join(map(repr, one.handled_by))} handled before."
    )
    former = [name for name in one.without_consumers if name not in of_project]
    renamed = (
        f" If it is {former[0]!r} under another name, stop its workers and run `outbox_group rename {former[0]} "
        f"{one.group}`."
        if former
        else ""
    )
    return NewGroup(
        one.group, text, f"Declare where it begins: start='earliest' for all of them, start='latest' for none.{renamed}"
    )
