"""The actions on consumer processes: drain one process, or stop its worker.

See decision 232.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

from outbox.broker.database.executor import Executor
from outbox.broker.groups.members import ProcessRequest
from outbox.broker.operations.changes import ask_process
from outbox.broker.operations.listings import ConsumerProcess, find_process
from outbox.contrib.django.actions.declaration import ActionField, ActionPlan, DeclaredAction, FieldKind, Values
from outbox.contrib.django.database.aliases import broker_connection
from outbox.errors import UsageError

_HEARTBEAT = "It reads the request within LEASE_SECONDS / 3."
_ENDS = (
    "It takes no more messages, ends its running calls, releases its queues and leaves its groups. Calls that still "
    "run after DRAIN_SECONDS are cut off, and their messages are delivered again."
)
_CAUTIONS: Final = {
    ProcessRequest.DRAIN: "The supervisor of the process does not start it again until the worker itself is started "
    "again. A process without a supervisor (`outbox_worker --role consumer`) ends as after a request to stop.",
    ProcessRequest.STOP: "The exit code is 0. A service manager that always restarts (systemd with Restart=always, "
    "Kubernetes, Docker with --restart=always) starts the worker again; with Restart=on-failure it stays stopped.",
}


def _drain(values: Values) -> ActionPlan:
    return _planned(values["process"], ProcessRequest.DRAIN, "Drain process {0.pid} on {0.host} for good.")


def _stop(values: Values) -> ActionPlan:
    what = "Stop the worker of process {0.pid} on {0.host}, with all processes of the worker, as SIGTERM does."
    return _planned(values["process"], ProcessRequest.STOP, what)


def _planned(instance_id: UUID, request: ProcessRequest, what: str) -> ActionPlan:
    process = _living(instance_id)
    calls = f"{process.calls} handler calls run in it, and it owns {process.queues} queues."

    def do() -> Mapping[str, Any]:
        with broker_connection() as (connection, schema):
            if not ask_process(Executor(connection, schema), instance_id, request):
                # Say why.
                _living(instance_id)
                raise UsageError(f"process {instance_id} was asked to stop before, so it ends anyway.")
        return {"asked": str(request)}

    return ActionPlan(
        subject=f"process {process.pid} on {process.host}",
        effect=f"{what.format(process)} {_HEARTBEAT} {_ENDS} {calls}",
        caution=_CAUTIONS[request],
        dangerous=True,
        before={"asked": process.asked, "state": process.state},
        nothing=process.asked in (request, ProcessRequest.STOP),
        do=do,
    )


def _living(instance_id: UUID) -> ConsumerProcess:
    with broker_connection() as (connection, schema):
        process = find_process(Executor(connection, schema), instance_id)
    if process is None:
        raise UsageError(
            f"no process {instance_id} is known: it has ended and released its queues, so there is nothing to end. "
            "`outbox_process list` shows the processes."
        )
    if not process.is_alive:
        raise UsageError(
            f"process {instance_id} ({process.pid} on {process.host}) has vanished: it renewed nothing since "
            f"{process.expires_at:%Y-%m-%d %H:%M:%S %Z}, so its queues go to other processes, and there is nothing to "
            "end. If it hangs, end it on its host."
        )
    if process.seen_at is None:
        raise UsageError(
            f"process {instance_id} ({process.pid} on {process.host}) has not reported yet, so it may read no "
            "requests. Try again in some seconds, or send SIGTERM to its worker."
        )
    return process


_PROCESS = ActionField(
    name="process",
    kind=FieldKind.ID,
    required=True,
    positional=True,
    help="the id of the process, as the command list shows it",
)

ACTIONS: Final = (
    DeclaredAction(
        name="drain_process",
        title="Drain a consumer process; its supervisor does not start it again",
        command="outbox_process drain",
        fields=(_PROCESS,),
        plan=_drain,
    ),
    DeclaredAction(
        name="stop_worker",
        title="Stop the worker of a consumer process, with all of its processes",
        command="outbox_process stop",
        fields=(_PROCESS,),
        plan=_stop,
    ),
)
