"""The list of consumer processes.

See decision 232.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from django.utils.html import format_html, format_html_join

from outbox.broker.database.executor import Executor, Row
from outbox.broker.log.failing import failing
from outbox.broker.operations import summary
from outbox.broker.operations.listings import PROCESS_STATES, list_processes
from outbox.broker.operations.liveness import leadership
from outbox.contrib.django.actions.cells import ago, badge, group_link, html, joined, message_link, quiet, span
from outbox.contrib.django.actions.declaration import Field
from outbox.contrib.django.actions.listing import COMMAND, PAGE, Asked, Column, Listing, States

_MOST_PROCESSES: Final = 10_000
_SHOWN_GROUPS: Final = 8
_TONES: Final = {"alive": "good", "draining": "warn"}


def _notes(run: Executor, asked: Asked, rows: Sequence[Row]) -> Mapping[str, object]:
    versions = sorted({one.version for one in rows if one.version and one.is_alive})
    now, counted = leadership(run), summary.stored(run)
    leading = counted.leader if counted is not None else None
    process = leading if leading is not None and leading.owner == now.leader else None
    return {"leader": now, "process": process, "failing": failing(run), "versions": versions}


def _state(one: Row) -> list[object]:
    silent = one.is_alive and one.is_silent
    found: list[object] = [
        badge(f"{one.state}, but silent" if silent else one.state, "warn" if silent else _TONES.get(one.state, "bad"))
    ]
    if one.is_alive and one.is_outage:
        found.append(badge("outage", "bad"))
    return [*found, badge("leads")] if one.leads else found


def _groups(one: Row) -> object:
    left = len(one.groups) - _SHOWN_GROUPS
    shown = joined([group_link(name) for name in one.groups[:_SHOWN_GROUPS]])
    return [shown, f"and {left} more"] if left > 0 else shown


def _calls(one: Row) -> object:
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


def _is_in(state: str) -> Callable[[Row], bool]:
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
    ),
    lambda run, asked: list_processes(run, asked["group"], limit=_MOST_PROCESSES),
    command="outbox_process list",
    help="list the consumer processes of all workers",
    fields=(Field("group", "only processes of this consumer group"),),
    states=_STATES,
    json=(
        *("process=instance_id", "host", "pid", "state", "version", "groups", "queues", "calls", "leads"),
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
