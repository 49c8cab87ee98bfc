"""Reads the broker's state for a project: the conditions that hold, the probe for load balancers, and the audit.

Apps add the conditions of their own tables (`hooks.add_conditions`), because the broker does not know these tables.
"""

from __future__ import annotations

import dataclasses
import hmac
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from django.db import connections
from django.db.utils import Error

from outbox.broker.database.executor import Executor
from outbox.broker.database.timeouts import lock_limited
from outbox.broker.operations import audit, rules
from outbox.broker.operations.conditions import Condition, ConditionReport, Thresholds, unknown, worst_first
from outbox.broker.operations.rules import Survey, survey, unusable
from outbox.broker.operations.state import BrokerState
from outbox.broker.operations.summary import Overview, Summary, overview
from outbox.broker.schema.refusals import naming
from outbox.contrib.django.database import deadline
from outbox.contrib.django.database.aliases import on_broker, opened, require_database
from outbox.contrib.django.operations import known_conditions
from outbox.contrib.django.operations.lock_holders import naming_lock_holders
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.settings.definition import unknown as unknown_name
from outbox.errors import BrokerError, ConfigurationError, OutboxError

logger = logging.getLogger(__name__)


def is_authorized(header: str) -> bool:
    """Return whether an Authorization header has the token of OUTBOX['STATUS_TOKEN']. Without it, return False."""
    token = get_settings().status_token
    return token is not None and hmac.compare_digest(header.encode(), f"Bearer {token}".encode())


def survey_project(run: Executor) -> Survey:
    """Return the conditions of the broker and those of the application's own tables. Raises ConfigurationError."""
    thresholds = get_settings().thresholds
    refuse_unknown_thresholds(thresholds)
    found = survey(run, thresholds)
    if found.state is None:
        return found
    with lock_limited(run.connection):
        conditions = [*found.verdict.conditions, *_of_application(found.state)]
    return replace(found, verdict=worst_first(naming_lock_holders(conditions)))


def refuse_unknown_thresholds(thresholds: Thresholds) -> None:
    """Raise ConfigurationError if OUTBOX['THRESHOLDS'] names a threshold that no condition has."""
    if not thresholds:
        return
    known = {one.name.upper() for condition in known_conditions.catalogue().values() for one in condition.thresholds}
    for name in thresholds:
        if name.upper() not in known:
            raise unknown_name("OUTBOX['THRESHOLDS']", name.upper(), "threshold", known)


def _of_application(state: BrokerState) -> Iterator[Condition]:
    # Otherwise a command that looks again and again would keep a connection that a restart of the server has closed.
    for connection in connections.all(initialized_only=True):
        if connection.errors_occurred:
            connection.close_if_unusable_or_obsolete()
    for name, one in known_conditions.application_conditions().items():
        try:
            yield from one.evaluate(state)
        except Error as error:
            # Without a report, an operator would think that the condition does not hold.
            logger.warning(
                "it is unknown whether the condition %r holds, because its table could not be read: %s", name, error
            )
            yield unknown(name, error)


@dataclass(frozen=True, slots=True)
class BrokerView:
    """The conditions that hold, and an overview of the broker with the summary of which it is made.

    Both are None if the broker does not answer, and if another module observes the engine: then `server` has figures.
    """

    verdict: ConditionReport
    overview: Overview | None
    server: known_conditions.Figures | None = None
    summary: Summary | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the conditions and the overview as plain values for JSON."""
        broker = self.server or self.overview
        return {**self.verdict.as_json(), "broker": broker.as_json() if broker else None}


def look() -> BrokerView:
    """Read the conditions and the overview. If the broker is unreachable, a condition says so.

    Raises ConfigurationError.
    """
    if (observer := known_conditions.observer()) is not None:
        verdict, server = observer.look()
        return BrokerView(verdict, None, server)
    try:
        with asking() as run:
            found = survey_project(run)
            if found.state is None:
                return BrokerView(found.verdict, None)
            with lock_limited(run.connection):
                summary = found.state.summary
                return BrokerView(found.verdict, overview(run, summary), summary=summary)
    except BrokerError as error:
        return BrokerView(unusable(error), None)


def probe() -> ConditionReport:
    """Evaluate the few rules for load balancers. If the broker is unreachable, a condition says so.

    Raises ConfigurationError.
    """
    if (observer := known_conditions.observer()) is not None:
        return observer.probe()
    try:
        with asking() as run:
            return rules.probe(run, get_settings().thresholds)
    except ConfigurationError:
        # The broker answers, but the settings or the rights of this login are wrong.
        raise
    except OutboxError as error:
        return unusable(error)


# The messages are counted once a day: the pass `audit` looks every hour whether the last audit is older than this.
AUDIT_SECONDS: Final = 23 * 3600.0


def run_audit() -> dict[str, Any]:
    """Count all messages, check the equations of the counts, and store the result.

    Raises BrokerError or ConfigurationError.
    """
    return dataclasses.asdict(on_broker(audit.run_once))


def audit_when_due() -> dict[str, Any]:
    """Call `run_audit` if the last audit is older than AUDIT_SECONDS."""
    if not get_settings().has_database:
        return {}
    last = on_broker(audit.last)
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
