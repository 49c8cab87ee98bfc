"""Handle the death of a consumer process in its supervisor.

It records the death, puts the messages that were running into quarantine, and releases the leases of the dead process:
its queues and the leadership. Handlers die with their process, so another consumer may take the queues at once.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Final

import psycopg

from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.database.notify import Channel, notify
from outbox.broker.database.timeouts import lifted
from outbox.broker.groups import quarantine
from outbox.broker.log import incidents
from outbox.broker.log.incidents import Incident, IncidentKind
from outbox.broker.supervisor import ChildDeath
from outbox.errors import BrokerUnavailable

# A stopping supervisor waits for this long. Service managers commonly kill after 30 s, and draining takes 20 s of it.
_TIMEOUT_SECONDS: Final = 5.0


def record(database: BrokerDatabase, death: ChildDeath) -> None:
    """Store the death and release the dead process's leases, durably on return.

    If the process was told to stop, only the leases are released: its death proves nothing about its messages. Raises
    BrokerUnavailable when that is not possible now.
    """
    if death.told_to_stop and death.left_behind is None:
        return
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    try:
        with (
            contextlib.closing(database.open(name="outbox-supervisor", timeout_seconds=_TIMEOUT_SECONDS)) as opened,
            opened.within(deadline),
        ):
            _record(Executor(opened, database.schema), death)
    except psycopg.Error as error:
        raise BrokerUnavailable(f"the death of {death.child} cannot be recorded now: {error}") from error


def _record(run: Executor, death: ChildDeath) -> None:
    left = death.left_behind
    calls = left.calls if left is not None and not death.told_to_stop else []
    process = f"{death.child} on {socket.gethostname()}"
    event = f"ended itself because handlers hang ({death.how})" if death.hung else f"died ({death.how})"
    with lifted(run.connection):
        if not death.told_to_stop:
            running = sum(len(call.log_ids) for call in calls)
            incident = Incident(IncidentKind.PROCESS_DIED, process, f"{event} while it handled {running} messages")
            incidents.record(run, [incident])
        if left is not None:
            # Imported here: only a supervisor that has seen a death needs the sequencer's modules.
            from outbox.broker.sequencer import leader

            leader.release_dead(run, left.instance)
            quarantine.record_death(run, left.instance, calls, evidence=f"{process} {event}", hung=death.hung)
    # After the commit: inside the transaction, the notification could let that commit return before it is on the disk.
    notify(run, Channel.SHARED)
