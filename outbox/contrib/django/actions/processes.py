"""The actions on consumer processes: drain one process, or stop its worker.

See decision 232.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from django.utils.html import format_html, format_html_join

from outbox.broker.database.executor import Executor
from outbox.broker.groups.members import ProcessRequest
from outbox.broker.log.failing import failing
from outbox.broker.operations import summary
from outbox.broker.operations.changes import ask_process
from outbox.broker.operations.listings import PROCESS_STATES, ConsumerProcess, find_process, list_processes
from outbox.contrib.django.actions.cells import ago, badge, group_link, html, joined, message_link, quiet, span
from outbox.contrib.django.actions.declaration import ActionPlan, Field, FieldKind, Values, action, argument
from outbox.contrib.django.actions.listing import COMMAND, PAGE, Asked, Button, Column, Listing, States, actions
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


_PROCESS: Final = argument("process", "the id of the process, as the command list shows it", FieldKind.ID)


@action(
    "drain_process",
    "Drain a consumer process; its supervisor does not start it again",
    "outbox_process drain",
    _PROCESS,
)
def _drain(values: Values) -> ActionPlan:
    return _planned(values["process"], ProcessRequest.DRAIN, "Drain process {0.pid} on {0.host} for good.")


@action(
    "stop_worker", "Stop the worker of a consumer process, with all of its processes", "outbox_process stop", _PROCESS
)
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


# -- the list -------------------------------------------------------------------------------------------

_MOST_PROCESSES: Final = 10_000
_SHOWN_GROUPS: Final = 8
_TONES: Final = {"alive": "good", "draining": "warn"}


def _notes(run: Executor, asked: Asked, rows: Sequence[ConsumerProcess]) -> Mapping[str, object]:
    versions = sorted({one.version for one in rows if one.version and one.is_alive})
    return {"leader": summary.leadership(run), "failing": failing(run), "versions": versions}


def _state(one: ConsumerProcess) -> list[object]:
    silent = one.is_alive and one.is_silent
    found: list[object] = [
        badge(f"{one.state}, but silent" if silent else one.state, "warn" if silent else _TONES.get(one.state, "bad"))
    ]
    if one.asked and not one.draining:
        found += [badge(f"asked to {one.asked}", "warn"), ago(one.asked_at)]
    return [*found, badge("leads")] if one.leads else found


def _groups(one: ConsumerProcess) -> object:
    left = len(one.groups) - _SHOWN_GROUPS
    shown = joined([group_link(name) for name in one.groups[:_SHOWN_GROUPS]])
    return [shown, f"and {left} more"] if left > 0 else shown


def _calls(one: ConsumerProcess) -> object:
    if one.seen_at is None:
        return None
    if not one.running:
        return one.calls
    # The process counted the seconds when it was seen.
    since = max(0.0, (datetime.now(UTC) - one.seen_at).total_seconds())
    lines = [
        [
            *(span(call.seconds + since), call.message_id and message_link(call.message_id)),
            f"and {call.messages - 1} more," if call.messages > 1 else None,
            f"{call.group} on {call.topic}, attempt {call.attempt}",
        ]
        for call in one.running
    ]
    return [
        one.calls,
        format_html(
            '<details><summary>The longest for {}</summary><ul class="calls">{}</ul></details>',
            span(one.running[0].seconds + since),
            format_html_join("", "<li>{}</li>", ((html(line),) for line in lines)),
        ),
    ]


def _buttons(one: ConsumerProcess) -> list[Button]:
    if not one.is_alive or one.seen_at is None or one.asked == "stop":
        return []
    process = {"process": one.instance_id}
    drain = [] if one.asked == "drain" else [Button("drain_process", "Drain …", fields=process)]
    return [*drain, Button("stop_worker", "Stop worker …", "bad", process)]


def _is_in(state: str) -> Callable[[ConsumerProcess], bool]:
    return lambda one: one.state == state


_STATES: Final[States] = {
    "": ("All", lambda one: True),
    **{name: (name.capitalize(), _is_in(name)) for name in PROCESS_STATES},
}
PROCESSES: Final = Listing(
    "workers",
    (
        Column("Process", "instance_id", on=COMMAND),
        Column("Process", lambda one: [str(one.pid), quiet(f"on {one.host}")], "head"),
        Column("State", _state),
        Column("Version", "version"),
        Column("Groups", _groups),
        Column("Queues", "queues", "number"),
        Column("Calls", lambda one: one.calls, on=COMMAND),
        Column("Running calls", _calls, on=PAGE),
        Column("Last sign of life", lambda one: ago(one.seen_at)),
        Column("Since", lambda one: ago(one.joined_at)),
        actions(_buttons),
    ),
    lambda run, asked: list_processes(run, asked["group"], limit=_MOST_PROCESSES),
    command="outbox_process list",
    help="list the consumer processes of all workers",
    fields=(Field("group", "only processes of this consumer group"),),
    states=_STATES,
    json=(
        *("process=instance_id", "host", "pid", "state", "asked", "version", "groups", "queues", "calls", "leads"),
        "seen_at",
    ),
    address="workers/",
    title=lambda given: "Workers" + (f" of {given['group']}" if given["group"] else ""),
    caption="Consumer processes",
    empty="No process is in this state.",
    unused="No consumer process runs. `celery -A app worker --outbox` or `manage.py outbox_worker` starts them.",
    key=lambda one: str(one.instance_id),
    notes=_notes,
    template="workers",
    is_live=True,
)
