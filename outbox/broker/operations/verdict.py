"""The verdict on a broker: evaluate each rule once. Command, exit code, metric, alert and page render it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from psycopg.errors import LockNotAvailable

from outbox.broker.database.executor import Executor
from outbox.broker.database.timeouts import lock_limited
from outbox.broker.operations import (
    rules_broker,
    rules_groups,
    rules_restores,
    rules_server,
    rules_suspects,
    rules_transactions,
)
from outbox.broker.operations import summary as summaries
from outbox.broker.operations.conditions import Condition, ConditionReport, Severity, condition, worst_first
from outbox.broker.operations.summary import Summary
from outbox.broker.operations.thresholds import Thresholds
from outbox.broker.schema.install import check_schema
from outbox.errors import SchemaError

Rules = Callable[[Executor, Thresholds, Summary], Iterator[Condition]]

_ROOMS: Final[Sequence[Rules]] = (
    rules_broker.rules,
    rules_restores.rules,
    rules_transactions.rules,
    rules_groups.rules,
    rules_suspects.rules,
    rules_server.rules,
)


@dataclass(frozen=True, slots=True)
class Survey:
    """A verdict, and the summary that it is based on; None if the tables could not be read."""

    verdict: ConditionReport
    summary: Summary | None


def survey(run: Executor, limits: Thresholds | None = None) -> Survey:
    """Return all conditions that hold now, on an autocommit connection outside a transaction.

    If the tables do not fit this code, or a session keeps them locked for more than a second, that is the verdict.
    """
    limits = limits or Thresholds()
    try:
        with lock_limited(run.connection):
            check_schema(run.connection, run.schema)
        # A new count is a separate transaction.
        summary = summaries.read(run)
        with lock_limited(run.connection):
            return Survey(worst_first(one for rules in _ROOMS for one in rules(run, limits, summary)), summary)
    except SchemaError as error:
        return Survey(unusable(error), None)
    except LockNotAvailable:
        return Survey(worst_first(rules_server.shut_out(run), is_complete=False), None)


def unusable(error: Exception) -> ConditionReport:
    """Return the verdict on a broker that cannot be asked: a SchemaError, or an error of the connection."""
    name = "schema_version" if isinstance(error, SchemaError) else "unreachable"
    return worst_first(condition(name, [(Severity.CRITICAL, {"error": str(error).strip()})]), is_complete=False)
