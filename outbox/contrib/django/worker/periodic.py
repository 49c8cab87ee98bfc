"""The periodic passes of a service: check-back, pruning, audit, comparing, reporting conditions, and those of parts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from outbox import hooks
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.log.failing import FailureNote, ProcessPart
from outbox.broker.transaction import turns
from outbox.contrib.django.database.aliases import broker_database, broker_executor
from outbox.contrib.django.engine.broker import engine_of, get_engine
from outbox.contrib.django.ledger.pruning import run_prune
from outbox.contrib.django.operations.comparing import compare_when_due
from outbox.contrib.django.operations.watching import audit_when_due
from outbox.contrib.django.publishing.checkback import check_back, is_my_turn
from outbox.contrib.django.settings.conf import get_settings
from outbox.utils.periodic import PeriodicPass

logger = logging.getLogger(__name__)

CONDITIONS_INTERVAL_SECONDS: Final = 15.0
PRUNE_INTERVAL_SECONDS: Final = 600.0
# One run of pruning ends after this number of seconds, because check-back waits on the same thread until the run ends.
# The next run continues the work.
PRUNE_TURN_SECONDS: Final = 2.0
# The pass `compare` runs at this interval, so it notices a new life of the broker within this time. If no comparison is
# due, the pass runs only one query.
_LOOK_INTERVAL_SECONDS: Final = 60.0

# After a restart, a worker begins the interval of each pass again. So the pass `audit` runs every hour, and counts the
# messages only if the last audit is a day old.
_AUDIT_LOOK_SECONDS: Final = 3600.0

_LEFT: Final = {"left_to": "another process, which has just begun this pass"}

# The names of passes that ended before their work was complete. In this process such a pass runs again at once,
# although it began only a short time ago.
_unfinished: set[str] = set()


def passes(part: ProcessPart = ProcessPart.PASS) -> list[PeriodicPass]:
    """Return the periodic passes of a producer service. A worker's role "check" or Celery beat runs these passes.

    A pass does not run if another process of the service has recently begun it. Without PRODUCER_GROUP there is no
    check-back, because no message can be published on the two-phase path. The notes about passes that fail have `part`.
    """
    settings, one = get_settings(), partial(_pass, part)
    always = [
        one("compare", _LOOK_INTERVAL_SECONDS, _compared),
        one("prune", PRUNE_INTERVAL_SECONDS, _pruned),
        one("audit", _AUDIT_LOOK_SECONDS, audit_when_due, in_every_process=True),
    ]
    if settings.has_database:
        always.append(one("conditions", CONDITIONS_INTERVAL_SECONDS, _conditions))
    for name, each in hooks.passes.items():
        work = hooks.when_called(each.work)
        always.append(one(name, each.interval_seconds, work, in_every_process=each.in_every_process))
    if not settings.producer_group:
        return always
    seconds = settings.check_interval_seconds
    of_engine = [
        PeriodicPass(name=name, interval_seconds=seconds, run=partial(_by_engine, name))
        for name in engine_of(settings).pass_names
    ]
    return [one(turns.CHECK_BACK, seconds, lambda: asdict(check_back())), *of_engine, *always]


def tasks() -> list[PeriodicPass]:
    """Return the same passes for Celery beat. Nothing calls `keep_notes` between two of these runs."""
    return passes(ProcessPart.TASK)


def _conditions() -> Mapping[str, Any]:
    # A Celery app may list the passes before Django has loaded the models that this module imports.
    from outbox.contrib.django.operations import raised

    return raised.run_once()


def _by_engine(name: str) -> Mapping[str, Any]:
    return get_engine().run_pass(name)


def _compared() -> Mapping[str, Any]:
    counts = compare_when_due()
    return {} if counts is None else asdict(counts)


def _pruned() -> Mapping[str, Any]:
    settings = get_settings()
    if settings.has_database and settings.producer_group:
        with broker_executor() as run:
            turns.forget_others(run, settings.producer_group, [one.name for one in passes()])
    return asdict(run_prune(max_seconds=PRUNE_TURN_SECONDS))


def _pass(
    part: ProcessPart,
    name: str,
    interval_seconds: float,
    work: Callable[[], Mapping[str, Any]],
    *,
    in_every_process: bool = False,
) -> PeriodicPass:
    run = work if in_every_process else partial(_in_turn, name, interval_seconds, work)
    return PeriodicPass(name=name, interval_seconds=interval_seconds, run=partial(_watched, part, name, run))


def _in_turn(name: str, interval_seconds: float, work: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    goes_on = name in _unfinished
    _unfinished.discard(name)
    if not is_my_turn(name, interval_seconds, rest_seconds=0 if goes_on else None):
        return _LEFT
    counts = work()
    if counts.get("more"):
        _unfinished.add(name)
    return counts


def _watched(part: ProcessPart, name: str, run: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    settings = get_settings()
    if not settings.has_database:
        return run()
    of = ", ".join(filter(None, (name, settings.producer_group)))
    database = broker_database(settings)
    # A pass runs rarely, so even its first failure is recorded at once.
    note = _notes.setdefault((database, part, of), FailureNote(database, part, of=of, in_a_row=1))
    with note.watching():
        return run()


def keep_notes() -> None:
    """Refresh the notes about the passes that have failed in this process, which runs. Call it every few seconds."""
    for note in list(_notes.values()):
        note.keep()


def end_notes() -> None:
    """End the notes about the passes that fail in this process, which ends. Its successor has notes of its own."""
    for note in list(_notes.values()):
        note.worked()


_notes: Final[dict[tuple[BrokerDatabase, ProcessPart, str], FailureNote]] = {}
