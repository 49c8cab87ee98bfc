"""Handle the death of a consumer process in its supervisor.

The supervisor records the death and puts the messages of the running calls into quarantine. The supervisor also
releases the queue leases and the leader lease of the dead process. Handlers die with their process, so another consumer
may acquire the queues of the dead process at once.
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

# While a supervisor stops, it waits at most this long (seconds) until the death of a child is recorded. Service
# managers commonly kill a process after 30 s, and draining may take 20 of these 30 s.
_TIMEOUT_SECONDS: Final = 5.0


def record(database: BrokerDatabase, death: ChildDeath) -> None:
    """Store the death and release the leases of the dead process; both are committed when this function returns.

    If the process was asked to stop, this function only releases the leases, because the death then proves nothing
    about the messages. Raises BrokerUnavailable if the database does not answer now.
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
            quarantine.record_death(run, left.instance, calls, evidence=f"{process} {event}", hung=death.hung)
    # Send the notification after the commit. A notification switches `synchronous_commit` off for its transaction. The
    # transaction that stores the death must wait for the disk, so it contains no notification.
    notify(run, Channel.SHARED)
