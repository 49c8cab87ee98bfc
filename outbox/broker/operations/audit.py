"""The audit of conservation: count every message, each term from its own rows, and keep the result."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from typing import Any, Final

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.operations.status import BrokerStatus, broker_status

_KEPT: Final = 100

_STORE: Final = Statement("""
INSERT INTO {schema}.audit (took_seconds, differences, facts)
VALUES (%(took)s, %(differences)s, %(facts)s::text::jsonb)
RETURNING at::text
""")
_TRIM: Final = Statement("""
DELETE FROM {schema}.audit WHERE audit_id <= (SELECT max(audit_id) FROM {schema}.audit) - %(kept)s
""")
_LAST: Final = Statement("""
SELECT at::text, extract(epoch FROM clock_timestamp() - at)::double precision AS age_seconds, took_seconds, differences,
       facts
FROM {schema}.audit ORDER BY audit_id DESC LIMIT 1
""")


@dataclass(frozen=True, slots=True)
class Audit:
    """One audit. `facts` has the terms per topic and per group; `differences` is empty when every equation holds."""

    at: str
    age_seconds: float
    took_seconds: float
    differences: list[str]
    facts: dict[str, Any]


def run_once(run: Executor) -> Audit:
    """Count every retained message, compare, and store the result, on an autocommit connection.

    The connection is outside a transaction. It takes about a second per million messages. No other process waits for
    it, but it holds one snapshot meanwhile.
    """
    started = time.monotonic()
    status = broker_status(run)
    took = time.monotonic() - started
    differences = found_differences(status)
    facts = {
        "topics": {topic.name: dataclasses.asdict(topic.totals) for topic in status.topics},
        "groups": {
            group.name: {
                field.name: value
                for field in dataclasses.fields(group)
                if type(value := getattr(group, field.name)) is int
            }
            for group in status.groups
        },
    }
    [at] = run.one(_STORE, {"took": took, "differences": differences, "facts": json.dumps(facts)})
    run.execute(_TRIM, {"kept": _KEPT})
    return Audit(at, 0.0, took, differences, facts)


def found_differences(status: BrokerStatus) -> list[str]:
    """Return the equations that do not hold, with their topic or group."""
    found = [f"topic {topic.name!r}: {text}" for topic in status.topics for text in topic.totals.differences()]
    return found + [f"group {group.name!r}: {text}" for group in status.groups for text in group.differences()]


def last(run: Executor) -> Audit | None:
    """Return the newest stored result; None before the first audit."""
    found = run.objects(Audit, _LAST)
    return found[0] if found else None
