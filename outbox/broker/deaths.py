"""What a supervising process does about a consumer process that died: says so, and accuses what was running in it."""

from __future__ import annotations

import contextlib
import socket
from typing import Final

import psycopg

from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.groups import suspects
from outbox.broker.log import incidents
from outbox.broker.log.incidents import Incident, IncidentKind
from outbox.broker.supervisor import Death
from outbox.errors import BrokerUnavailable

_TIMEOUT_SECONDS: Final = 10.0


def record(database: BrokerDatabase, death: Death) -> None:
    """Store it, durably on return. Raises BrokerUnavailable when that is not possible now."""
    try:
        with contextlib.closing(database.open(name="outbox-supervisor", timeout_seconds=_TIMEOUT_SECONDS)) as opened:
            _record(Executor(opened, database.schema), death)
    except psycopg.Error as error:
        raise BrokerUnavailable(f"the death of {death.child} cannot be recorded now: {error}") from error


def _record(run: Executor, death: Death) -> None:
    who = f"{death.child} on {socket.gethostname()}"
    left = death.left_behind
    running = sum(len(call.log_ids) for call in left.calls) if left is not None else 0
    what = f"ended itself because handlers hang ({death.how})" if death.hung else f"died ({death.how})"
    with run.connection.transaction():
        incident = Incident(IncidentKind.PROCESS_DIED, who, f"{what} while it handled {running} messages")
        incidents.record(run, [incident])
        if left is not None:
            # Who supervises loads it only when it is needed.
            from outbox.broker.sequencer import leader

            leader.release_dead(run, left.instance)
            suspects.record_death(run, left.instance, left.calls, evidence=f"{who} {what}", hung=death.hung)
