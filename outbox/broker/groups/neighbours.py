"""Release what a dead process of this machine still holds, when another one starts.

After `kill -9` of a whole worker, no supervisor is left that would release the leases of its processes. Without this
module, the new worker waits until they expire: ten seconds in which its queues stand still, once for each crash.
"""

from __future__ import annotations

import logging
import socket
from typing import Final

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.groups import leases, members
from outbox.utils.process_identity import has_ended

logger = logging.getLogger(__name__)

_NEIGHBOURS: Final = Statement("""
SELECT DISTINCT instance_id, pid, process FROM {schema}.consumer
WHERE host = %(host)s AND process <> '' AND expires_at > clock_timestamp()
""")


def release_the_ended(run: Executor) -> None:
    """Let the ended processes of this machine leave their groups.

    Their messages go into quarantine only if a supervisor has seen the process die: this function does not know why a
    process has ended.
    """
    for instance, pid, process in run.rows(_NEIGHBOURS, {"host": socket.gethostname()}):
        if has_ended(process):
            logger.warning("process %d has ended without its worker: its queues are free again", pid)
            with run.connection.transaction():
                leases.release_all(run, instance)
                members.leave(run, instance)
