"""All actions by their names. The name of an action is in its address, on its button and in the audit.

See decision 197.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from outbox.contrib.django.actions import (
    broker,
    endpoints,
    erasing,
    findings,
    groups,
    messages,
    processes,
    relay,
    schedules,
    transactions,
)
from outbox.contrib.django.actions.declaration import DeclaredAction

ACTIONS: Final[Mapping[str, DeclaredAction]] = {
    action.name: action
    for room in (transactions, messages, groups, processes, schedules, endpoints, relay, findings, broker, erasing)
    for action in room.ACTIONS
}


def of_command(command: str) -> tuple[DeclaredAction, ...]:
    """The actions of a command, such as `outbox_group`."""
    return tuple(action for action in ACTIONS.values() if action.command.split()[0] == command)
