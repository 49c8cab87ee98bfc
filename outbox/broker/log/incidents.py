"""Incidents for the operator: contradicting or refused end messages, wrong ledgers, parked transactions and others."""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from outbox.broker.database.arrays import texts
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.utils.safe_text import storable

logger = logging.getLogger(__name__)


class IncidentKind(enum.StrEnum):
    CONTRADICTED = "contradicted"
    """A second decision on a transaction differed from the first decision, which is final."""
    REFUSED = "refused"
    """An end message named an unknown transaction, or a transaction of another producer group."""
    PARKED = "parked"
    """A transaction has exceeded its check limits and waits for an operator or a late end message."""
    WRONG_LEDGER = "wrong_ledger"
    """Check-back could not use the ledger of a transaction, for example because it is that of another project."""
    RESYNC = "resync"
    """The broker's transaction ids restarted at a lower number, and the broker compared its log with its queues."""
    PATH = "path"
    """A process found the broker on another server or database than the process had verified before."""
    EXPIRED = "expired"
    """Retention removed messages that a consumer group had not consumed."""
    CLOCK = "clock"
    """Rows had times in the future, and the broker has changed them: a clock was ahead, and was set back."""
    PROCESS_DIED = "process_died"
    """A supervised consumer process died, or ended itself because its handlers hang."""
    PROCESS_FAILING = "process_failing"
    """A part of a running process fails; `at` is the time of the last failure."""
    PROCESS_FAILED = "process_failed"
    """A part of a process failed, and works again."""
    OUTAGE = "outage"
    """The outage of a subscription has ended; `subject` is the group with the topic."""
    SETTLED = "settled"
    """An operator has settled the incident, so no condition names it. `detail` begins with the former kind."""


@dataclass(frozen=True, slots=True)
class Incident:
    """One recorded incident. `subject` is a text that names the object of the incident.

    A stored incident has a time and an id.
    """

    kind: str
    subject: str
    detail: str
    at: datetime | None = None
    incident_id: int | None = None


_RECORD = Statement("""
INSERT INTO {schema}.incident (kind, subject, detail)
SELECT * FROM unnest(%(kinds)s::text[], %(subjects)s::text[], %(details)s::text[])
""")

_RECENT = Statement("""
SELECT kind, subject, detail, at, incident_id FROM {schema}.incident
WHERE (%(kind)s::text IS NULL OR kind = %(kind)s) AND (%(before)s::bigint IS NULL OR incident_id < %(before)s)
ORDER BY incident_id DESC LIMIT %(limit)s
""")


def record(run: Executor, incidents: Sequence[Incident]) -> None:
    """Store incidents and log them as warnings."""
    if not incidents:
        return
    for incident in incidents:
        logger.warning("incident %s: %s: %s", incident.kind, incident.subject, incident.detail)
    run.execute(_RECORD, _columns(incidents))


def _columns(incidents: Sequence[Incident]) -> dict[str, Any]:
    return {
        "kinds": texts([incident.kind for incident in incidents]),
        "subjects": texts([storable(incident.subject) for incident in incidents]),
        "details": texts([storable(incident.detail) for incident in incidents]),
    }


# The window lets the statement read the index of times. A transaction is checked more often than once a day.
_RENEW = Statement("""
UPDATE {schema}.incident SET at = clock_timestamp(), detail = given.detail
FROM unnest(%(kinds)s::text[], %(subjects)s::text[], %(details)s::text[]) AS given (kind, subject, detail)
WHERE at > now() - interval '1 day' AND incident.kind = given.kind AND incident.subject = given.subject
RETURNING incident.kind, incident.subject
""")


def record_once(run: Executor, incidents: Sequence[Incident]) -> None:
    """Store incidents as `record` does; one of the same kind and subject gets the new time and detail instead."""
    known = set(run.rows(_RENEW, _columns(incidents))) if incidents else set()
    record(run, [one for one in incidents if (str(one.kind), storable(one.subject)) not in known])


def recent(
    run: Executor, kind: str | None = None, *, before: int | None = None, limit: int = 20
) -> list[Incident]:  # fmt: skip
    """Return a page of the incidents of one kind, or of all kinds, the newest first.

    To read the next page, pass the id of the last incident as `before`.
    """
    return run.objects(Incident, _RECENT, {"kind": kind, "before": before, "limit": limit})
