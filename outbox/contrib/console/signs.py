"""What a page knows about the broker at this moment: whether it answers, is led, and whether its processes are alive.

Every page reads it once. An open page asks for it every second (`CHECK_SECONDS`), and reads itself again as soon as
something has changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import psycopg

from outbox.broker.database.executor import Row
from outbox.broker.operations.conditions import duration
from outbox.broker.operations.liveness import Liveness, liveness
from outbox.contrib.console.asking import reading
from outbox.contrib.django.operations.known_conditions import observer
from outbox.errors import OutboxError

# How often an open page asks whether something has changed.
CHECK_SECONDS: Final = 1.0

_UNREACHABLE: Final = "unreachable"
_NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class Signs:
    """`state` differs as soon as a page should be read again. `notice`: what every page must say; '' if all is well.

    `liveness` is None if the broker does not answer, and if it is not in PostgreSQL.
    """

    state: str = ""
    notice: str = ""
    liveness: Liveness | None = None

    @property
    def doubt(self) -> str:
        """Why nothing may look healthy now, as one sentence without a full stop; '' if nothing is in doubt."""
        found = self.liveness
        if found is None:
            return self.notice and "The broker did not answer"
        if not found.leads:
            return "No process leads the broker"
        if not found.silent:
            return ""
        shown = ", ".join(map(_silence, found.silent[:_NAMED]))
        left = len(found.silent) - _NAMED
        return f"No sign of life from {shown}" + (f", and {left} more" if left > 0 else "")


def _silence(one: Row) -> str:
    every = f"; one is due every {duration(one.every_seconds)}" if one.every_seconds else ""
    return f"{one.name} (for {duration(one.seconds)}{every})"


def read_signs() -> Signs:
    """Read the signs now. The function does not raise if the broker does not answer."""
    try:
        if observer() is not None:
            return Signs()
        with reading() as run:
            found = liveness(run)
    except (OutboxError, psycopg.Error) as error:
        return Signs(_UNREACHABLE, f"It is unknown whether a process leads the broker: {str(error).strip()}")
    return Signs(found.state, _notice(found), found)


def _notice(found: Liveness) -> str:
    if found.leads:
        return ""
    seconds = found.leaderless_seconds
    since = "No process has ever led the broker" if seconds is None else f"No process has led for {duration(seconds)}"
    return (
        f"{since}: groups get no new messages, and figures are old. Start a worker: `celery -A app worker --outbox` or "
        "`manage.py outbox_worker`."
    )
