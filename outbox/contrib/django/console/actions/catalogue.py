"""All actions, by name. The name is part of the address, the button, and the audit.

See decision 106.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from outbox.contrib.django.console.actions import dead_letters, groups, transactions, waiting
from outbox.contrib.django.console.actions.plan import PageAction

ACTIONS: Final[Mapping[str, PageAction]] = {
    action.name: action for room in (transactions, dead_letters, waiting, groups) for action in room.ACTIONS
}
