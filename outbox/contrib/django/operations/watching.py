"""Looking at the broker from a project: the verdict with what it rests on, the cheap probe, and the audit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from outbox.broker.database.executor import Executor
from outbox.broker.database.timeouts import lock_limited
from outbox.broker.operations import audit, health
from outbox.broker.operations.conditions import ConditionReport
from outbox.broker.operations.health import Health
from outbox.broker.operations.overview import Overview, overview
from outbox.broker.operations.verdict import survey, unusable
from outbox.broker.schema.refusals import naming
from outbox.contrib.django.database import deadline
from outbox.contrib.django.database.aliases import broker_connection, broker_database, require_database
from outbox.contrib.django.operations.application_rules import with_application
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import BrokerUnavailable, OutboxError, SchemaError


@dataclass(frozen=True, slots=True)
class BrokerView:
    """The verdict, and the broker at a glance; without the latter where it cannot be asked."""

    verdict: ConditionReport
    overview: Overview | None

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**self.verdict.as_json(), "broker": self.overview.as_json() if self.overview else None}


def look() -> BrokerView:
    """Look at everything once. A broker that cannot be asked is a verdict too. Raises ConfigurationError."""
    limits = get_settings().thresholds
    try:
        with asking() as run:
            found = survey(run, limits)
            if found.summary is None:
                return BrokerView(found.verdict, None)
            with lock_limited(run.connection):
                return BrokerView(with_application(found.verdict, run), overview(run, found.summary))
    except (BrokerUnavailable, SchemaError) as error:
        return BrokerView(unusable(error), None)


def probe() -> Health:
    """The cheap probe. A broker that cannot be asked is not healthy. Raises ConfigurationError."""
    settings = get_settings()
    require_database(settings)
    try:
        with asking() as run:
            return health.probe(run, settings.thresholds)
    except OutboxError as error:
        return Health((str(error).strip(),))


def run_audit() -> dict[str, Any]:
    """Count every message, compare, keep the result. Raises BrokerError or ConfigurationError."""
    with broker_connection() as (connection, schema):
        return dataclasses.asdict(audit.run_once(Executor(connection, schema)))


def audit_when_due() -> dict[str, Any]:
    """`run_audit`, unless anybody has audited within most of OUTBOX['AUDIT_INTERVAL_SECONDS']."""
    if not get_settings().has_database:
        return {}
    with broker_connection() as (connection, schema):
        last = audit.last(Executor(connection, schema))
    if last is not None and last.age_seconds < 0.9 * get_settings().audit_interval_seconds:
        return {"left_out": f"the last audit is {last.age_seconds:.0f} s old"}
    found = run_audit()
    return {"differences": found["differences"], "took_seconds": found["took_seconds"]}


@contextmanager
def asking() -> Iterator[Executor]:
    """A connection that does not mind which tables it finds."""
    settings = get_settings()
    require_database(settings)
    with (
        broker_database(settings).open(name="outbox-status") as connection,
        naming(f"looking at the broker on {settings.broker!r}", settings.schema),
        deadline.kept(connection),
    ):
        yield Executor(connection, settings.schema)
