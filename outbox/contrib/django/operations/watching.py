"""Reads the broker's state for a project: the conditions that hold, the probe for load balancers, and the audit.

The application may add rules for its own tables (`additions.add_rule`), because the broker does not know these tables.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from django.db import connections
from django.db.utils import Error

from outbox.broker.database.executor import Executor
from outbox.broker.database.timeouts import lock_limited
from outbox.broker.operations import audit, rules
from outbox.broker.operations.conditions import Condition, ConditionReport, unknown, worst_first
from outbox.broker.operations.rules import survey, unusable
from outbox.broker.operations.summary import Overview, Summary, overview
from outbox.broker.schema.refusals import naming
from outbox.contrib.django.database import deadline
from outbox.contrib.django.database.aliases import broker_connection, opened, require_database
from outbox.contrib.django.engine.operator_table import is_on_rocketmq
from outbox.contrib.django.operations import additions
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import BrokerUnavailable, OutboxError, SchemaError

if TYPE_CHECKING:
    from outbox.contrib.django.operations.rocketmq import ServerFigures

logger = logging.getLogger(__name__)


def with_application(verdict: ConditionReport, run: Executor) -> ConditionReport:
    """Return the conditions of the broker together with the conditions of the application's own tables."""
    return worst_first([*verdict.conditions, *_all(run)])


def _all(run: Executor) -> Iterator[Condition]:
    # Django renews the connections of a thread only at the start of a request. A command that looks again and again
    # would keep a connection that a restart of the server has closed.
    for connection in connections.all(initialized_only=True):
        if connection.errors_occurred:
            connection.close_if_unusable_or_obsolete()
    for name, rule in additions.rules.items():
        try:
            yield from rule(run)
        except Error as error:
            # Without a report, an operator would think that the condition does not hold.
            logger.warning(
                "it is unknown whether the condition %r holds, because its table could not be read: %s", name, error
            )
            yield unknown(name, error)


@dataclass(frozen=True, slots=True)
class BrokerView:
    """The conditions that hold, and an overview of the broker with the summary of which it is made.

    `overview` and `summary` are None if the broker does not answer. On RocketMQ, `server` has the figures, and both are
    None.
    """

    verdict: ConditionReport
    overview: Overview | None
    server: ServerFigures | None = None
    summary: Summary | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the conditions and the overview as plain values for JSON."""
        broker = self.server or self.overview
        return {**self.verdict.as_json(), "broker": broker.as_json() if broker else None}


def look() -> BrokerView:
    """Read the conditions and the overview once.

    If the broker is unreachable, a condition says so. Raises ConfigurationError.
    """
    if is_on_rocketmq():
        from outbox.contrib.django.operations import rocketmq

        verdict, server = rocketmq.look()
        return BrokerView(verdict, None, server)
    limits = get_settings().thresholds
    try:
        with asking() as run:
            found = survey(run, limits)
            if found.summary is None:
                return BrokerView(found.verdict, None)
            with lock_limited(run.connection):
                verdict = with_application(found.verdict, run)
                return BrokerView(verdict, overview(run, found.summary), summary=found.summary)
    except (BrokerUnavailable, SchemaError) as error:
        return BrokerView(unusable(error), None)


def probe() -> ConditionReport:
    """Evaluate the few rules for load balancers.

    If the broker is unreachable, a condition says so. Raises ConfigurationError.
    """
    if is_on_rocketmq():
        from outbox.contrib.django.operations import rocketmq

        return rocketmq.probe()
    settings = get_settings()
    require_database(settings)
    try:
        with asking() as run:
            return rules.probe(run, settings.thresholds)
    except OutboxError as error:
        return unusable(error)


# The messages are counted once a day: the pass `audit` looks every hour whether the last audit is older than this.
AUDIT_SECONDS: Final = 23 * 3600.0


def run_audit() -> dict[str, Any]:
    """Run the audit: count all messages, check the equations of the counts, and store the result.

    Raises BrokerError or ConfigurationError.
    """
    with broker_connection() as (connection, schema):
        return dataclasses.asdict(audit.run_once(Executor(connection, schema)))


def audit_when_due() -> dict[str, Any]:
    """Call `run_audit` if the last audit is older than AUDIT_SECONDS."""
    if not get_settings().has_database:
        return {}
    with broker_connection() as (connection, schema):
        last = audit.last(Executor(connection, schema))
    if last is not None and last.age_seconds < AUDIT_SECONDS:
        return {"left_out": f"the last audit is {last.age_seconds:.0f} s old"}
    found = run_audit()
    return {"differences": found["differences"], "took_seconds": found["took_seconds"]}


@contextmanager
def asking() -> Iterator[Executor]:
    """Open a connection to the broker, even if the version of its tables does not fit this code."""
    settings = get_settings()
    require_database(settings)
    with (
        opened(settings, name="outbox-status") as connection,
        naming(f"reading the broker on {settings.broker!r}", settings.schema),
        deadline.kept(connection),
    ):
        yield Executor(connection, settings.schema)
