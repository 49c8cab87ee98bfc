"""Fault points: named steps at which a test or the demo can kill, stop or delay this process, or raise an error.

They are armed by the environment variable OUTBOX_FAULTS when the process starts, or by `arm`. The syntax is
`name=action[@n][?file]`, with `;` between entries:

    OUTBOX_FAULTS="producer.after_local_commit=kill@3;sequencer.before_tick=delay:0.2"

The action is `kill` (SIGKILL), `stop` (SIGSTOP), `raise` (FaultInjected) or `delay:SECONDS`. With `@n` it runs only on
the n-th visit of the point, with `?file` only in the process that creates the file.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from outbox import hooks
from outbox.errors import ConfigurationError, OutboxError

# The fault points of the core, in the order in which a message passes them. Parts add theirs to `hooks.fault_points`.
POINTS: Final = (
    "producer.after_options",
    "producer.before_ledger",
    "producer.after_ledger",
    "producer.before_half",
    "producer.after_half",
    "producer.before_local_commit",
    "producer.after_local_commit",
    "producer.before_end",
    "producer.after_end",
    "sequencer.mid_resync",
    "sequencer.before_tick",
    "sequencer.mid_tick",
    "sequencer.after_tick",
    "check.after_claim",
    "check.before_tombstone",
    "check.after_tombstone",
    "check.before_report",
    "consumer.before_handler",
    "consumer.before_inbox_commit",
    "consumer.after_inbox_commit",
    "claim.before_take",
    "claim.after_take",
    "claim.before_step",
    "claim.in_step",
    "claim.after_step",
    "claim.before_finish",
    "claim.in_finish",
    "claim.before_commit",
    "claim.after_commit",
    "claim.before_leave",
    "claim.after_leave",
    "claim.before_settle",
    "claim.after_settle",
    "consumer.before_offset",
    "consumer.after_offset",
    "consumer.before_send_back",
    "consumer.after_send_back",
)


class FaultInjected(OutboxError):
    """A fault point raised this error because a test or the demo asked for it."""


@dataclass
class _Fault:
    action: Callable[[str], None]
    visit: int | None
    marker: str | None
    visits: int = 0


# The armed faults by their points. It is always the same object: where each call counts, code looks at it first.
armed: dict[str, _Fault] = {}
_lock = threading.Lock()


def point(name: str) -> None:
    """Run the action of the fault point `name`, if it is armed."""
    if not armed:
        return
    fault = armed.get(name)
    if fault is None:
        return
    with _lock:
        fault.visits += 1
        if fault.visit is not None and fault.visits != fault.visit:
            return
        if fault.marker is not None and not _first(fault.marker):
            return
    fault.action(name)


def arm(specification: str) -> None:
    """Arm faults from a specification; an empty one disarms all. Raises ConfigurationError."""
    wanted = _parsed(specification)
    _refuse_unknown(wanted)
    armed.clear()
    armed.update(wanted)


def check_environment() -> None:
    """Raise ConfigurationError if OUTBOX_FAULTS names a fault point that neither the core nor an installed part has.

    A process calls this once its parts are loaded, because this module reads the variable before.
    """
    _refuse_unknown(_parsed(os.environ.get("OUTBOX_FAULTS", "")))


def observe(names: Iterable[str], action: Callable[[str], None]) -> None:
    """Call `action` with the name of the point at each visit of these points. All other points are disarmed."""
    armed.clear()
    armed.update({name: _Fault(action, None, None) for name in names})


def _refuse_unknown(names: Iterable[str]) -> None:
    known = (*POINTS, *hooks.fault_points)
    for name in names:
        if name not in known:
            raise ConfigurationError(
                f"OUTBOX_FAULTS: there is no fault point {name!r}; the points are {', '.join(known)}."
            )


def _parsed(specification: str) -> dict[str, _Fault]:
    return dict(_parse(entry.strip()) for entry in specification.split(";") if entry.strip())


def _parse(entry: str) -> tuple[str, _Fault]:
    name, _, rest = entry.partition("=")
    rest, _, marker = rest.partition("?")
    action, _, visit = rest.partition("@")
    if visit and not visit.isdigit():
        raise ConfigurationError(f"OUTBOX_FAULTS: {entry!r}: write the number of the visit after '@', not {visit!r}.")
    return name, _Fault(_action(entry, action), int(visit) if visit else None, marker or None)


def _action(entry: str, action: str) -> Callable[[str], None]:
    kind, _, argument = action.partition(":")
    if kind == "kill":
        return lambda _: os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop":
        # To this thread: if another one received the signal, this one would continue for a moment.
        return lambda _: signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    if kind == "raise":

        def fail(name: str) -> None:
            raise FaultInjected(f"fault point {name} raised this error, as OUTBOX_FAULTS or `arm` demanded")

        return fail
    if kind == "delay":
        seconds = float(argument)
        return lambda _: time.sleep(seconds)
    raise ConfigurationError(f"OUTBOX_FAULTS: {entry!r}: the action must be kill, stop, raise or delay:SECONDS.")


def _first(marker: str) -> bool:
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


armed.update(_parsed(os.environ.get("OUTBOX_FAULTS", "")))
