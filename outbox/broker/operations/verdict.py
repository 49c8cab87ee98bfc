"""The verdict on a broker: every rule asked once. Command, exit code, metric, alert and page are renderings of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from psycopg.errors import LockNotAvailable

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.operations import (
    rules_broker,
    rules_groups,
    rules_restores,
    rules_server,
    rules_suspects,
    rules_transactions,
)
from outbox.broker.operations import summary as summaries
from outbox.broker.operations.conditions import Condition, Severity, Verdict, condition, worst_first
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

_LIMIT_WAITING: Final = Statement("SELECT set_config('lock_timeout', '1s', false)")


@dataclass(frozen=True, slots=True)
class Survey:
    """A verdict, and the summary that it rests on; None where the tables could not be read."""

    verdict: Verdict
    summary: Summary | None


def survey(run: Executor, limits: Thresholds | None = None) -> Survey:
    """All conditions that hold now, on an autocommit connection outside a transaction.

    Where the tables do not fit this code, or somebody keeps them locked, that is the verdict. The session waits for
    locks no longer than a second from now on: such a table must be reported, not waited for.
    """
    limits = limits or Thresholds()
    run.execute(_LIMIT_WAITING)
    try:
        check_schema(run.connection, run.schema)
        summary = summaries.read(run)
        return Survey(worst_first(one for rules in _ROOMS for one in rules(run, limits, summary)), summary)
    except SchemaError as error:
        return Survey(unusable(error), None)
    except LockNotAvailable:
        return Survey(worst_first(rules_server.shut_out(run)), None)


def unusable(error: Exception) -> Verdict:
    """The verdict where the broker cannot even be asked: a SchemaError, or an error of the connection."""
    name = "schema_version" if isinstance(error, SchemaError) else "unreachable"
    return worst_first(condition(name, [(Severity.CRITICAL, {"error": str(error).strip()})]))
