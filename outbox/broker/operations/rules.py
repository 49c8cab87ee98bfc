"""Finds the conditions that hold now: `survey` calls all rules of the broker, `probe` only two cheap ones.

`conditions.py` explains how a condition is declared. Parts add the modules with theirs (`outbox/hooks.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Final, cast

import psycopg
from psycopg.errors import LockNotAvailable

from outbox import hooks
from outbox.broker.database.executor import Executor
from outbox.broker.database.timeouts import lock_limited
from outbox.broker.operations import broker_conditions
from outbox.broker.operations import summary as summaries
from outbox.broker.operations.conditions import (
    Condition,
    ConditionReport,
    DeclaredCondition,
    Judged,
    Severity,
    Thresholds,
    worst_first,
)
from outbox.broker.operations.liveness import leadership
from outbox.broker.operations.state import BrokerState
from outbox.broker.schema.install import check_schema
from outbox.errors import SchemaError
from outbox.utils.causes import causes
from outbox.utils.refused_connections import is_refused


@dataclass(frozen=True, slots=True)
class Survey:
    """A verdict, and the state of the broker on which it is based. `state` is None if the tables could not be read."""

    verdict: ConditionReport
    state: BrokerState | None = None


def conditions() -> Mapping[str, DeclaredCondition[BrokerState]]:
    """Return the declared conditions of the broker's tables, by name."""
    modules = (broker_conditions, *map(import_module, hooks.broker_conditions))
    return {name: one for module in modules for name, one in module.CONDITIONS.items()}


def survey(run: Executor, thresholds: Thresholds | None = None) -> Survey:
    """Return all conditions that hold now, on an autocommit connection outside a transaction.

    If the tables do not fit this code, or a session keeps them locked for more than a second, the only condition is
    `schema_version` or `lock_held`.
    """
    try:
        with lock_limited(run.connection):
            check_schema(run.connection, run.schema)
        # If no fresh summary is stored, `summaries.read` counts the figures itself, in a separate transaction.
        state = BrokerState(run, summaries.read(run), thresholds or {})
        with lock_limited(run.connection):
            return Survey(worst_first(_holding(state)), state)
    except SchemaError as error:
        return Survey(unusable(error))
    except LockNotAvailable:
        return Survey(_locked(run))


def _locked(run: Executor) -> ConditionReport:
    held = broker_conditions.CONDITIONS["lock_held"].from_facts(broker_conditions.locked_out(run))
    return worst_first(held, is_complete=False)


def _holding(state: BrokerState) -> Iterator[Condition]:
    declared = conditions().values()
    excused: dict[str, set[object]] = {}
    for one in declared:
        if one.excuses and one.rule:
            facts = [fact for _, fact in cast(Iterable[Judged], one.rule(state))]
            for name in one.excuses:
                excused.setdefault(name, set()).update(fact.get("group") for fact in facts)
    for one in declared:
        yield from one.evaluate(state, excused.get(one.name, ()))


def probe(run: Executor, thresholds: Thresholds | None = None) -> ConditionReport:
    """Return whether a leader runs and makes its ticks in time. Raises psycopg.Error.

    It makes a few look-ups by index, so its duration does not depend on the size of the tables, and a load balancer may
    call it every second. If a session keeps a table locked for more than a second, the only condition is `lock_held`.
    """
    try:
        with lock_limited(run.connection):
            now = leadership(run)
            if now.leader is None:
                return worst_first([broker_conditions.CONDITIONS["no_sequencer"].condition(Severity.CRITICAL, [{}], 1)])
            waiting = broker_conditions.oldest_undelivered(run, thresholds or {}, now.snapshot)
            return worst_first(broker_conditions.CONDITIONS["ticks_late"].from_facts([waiting]))
    except LockNotAvailable:
        return _locked(run)


# The SQLSTATE classes of errors with which a server or a pooler ends or refuses a session.
_NO_SESSION: Final = ("08", "57P")


def unusable(error: Exception) -> ConditionReport:
    """Return the verdict on a broker that was not read; `error` is a SchemaError or an error of the connection."""
    name = "schema_version" if isinstance(error, SchemaError) else "unreachable"
    if is_refused(error):
        name = "connections_refused"
    found = broker_conditions.CONDITIONS[name].condition(Severity.CRITICAL, [{"error": str(error).strip()}], 1)
    if name == "unreachable" and _has_answered(error):
        found = replace(
            found,
            meaning="The broker's database answers, but it did not execute a statement that reads the conditions.",
            next_step="Do what the error says. If a timeout ended the statement, look for what makes the server slow, "
            "or raise the timeout of this login.",
        )
    return worst_first([found], is_complete=False)


def _has_answered(error: Exception) -> bool:
    """Whether the server has refused or cancelled a statement, in a session that it keeps."""
    of_driver = next((one for one in causes(error) if isinstance(one, psycopg.Error)), None)
    state = of_driver.sqlstate if of_driver is not None else None
    return state is not None and not state.startswith(_NO_SESSION)
