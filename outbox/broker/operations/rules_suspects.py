"""Conditions of handlers that kill or hang their process, or pause because a service they need is down."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.operations.conditions import EVIDENCE, Condition, Fact, Judged, Severity, condition
from outbox.broker.operations.summary import Summary
from outbox.broker.operations.thresholds import Thresholds

# A process that dies this often within this many seconds is in a crash loop; there is an incident per death.
_DEATHS: Final = 3
_DEATHS_SECONDS: Final = 600.0
_CRASH_LOOPS: Final = Statement("""
SELECT subject, count(*), max(at)::text, (array_agg(detail ORDER BY incident_id DESC))[1]
FROM (SELECT * FROM {schema}.incident
      WHERE kind = 'process_died' AND at > clock_timestamp() - make_interval(secs => %(seconds)s)
      ORDER BY at DESC LIMIT 1000) AS recent
GROUP BY subject HAVING count(*) >= %(deaths)s ORDER BY 2 DESC
""")

# The first of each kind: many messages that kill their process do not hide one that hangs.
_SUSPECTS: Final = Statement("""
SELECT hung, consumer_group.name, log.message_id::text, log.key, deaths,
       extract(epoch FROM clock_timestamp() - suspected_at)::double precision, evidence, total
FROM (SELECT *, count(*) OVER (PARTITION BY hung) AS total,
             row_number() OVER (PARTITION BY hung ORDER BY deaths DESC, suspected_at) AS place
      FROM {schema}.suspect) AS suspect
JOIN {schema}.consumer_group USING (group_id) LEFT JOIN {schema}.commit_log log USING (log_id)
WHERE place <= %(limit)s
ORDER BY deaths DESC, suspected_at
""")

_OUTAGES: Final = Statement("""
SELECT consumer_group.name, topic.name, count(*),
       max(extract(epoch FROM clock_timestamp() - since))::double precision, (array_agg(error ORDER BY seen_at DESC))[1]
FROM {schema}.outage JOIN {schema}.consumer_group USING (group_id) JOIN {schema}.topic USING (topic_id)
WHERE EXISTS (SELECT FROM {schema}.consumer
              WHERE consumer.instance_id = outage.instance_id AND expires_at > clock_timestamp())
GROUP BY 1, 2 ORDER BY 4 DESC
""")


def rules(run: Executor, limits: Thresholds, summary: Summary) -> Iterator[Condition]:
    """Return all conditions of this module, which needs neither limits nor summary."""
    yield from condition(
        "crash_loop",
        [
            (Severity.CRITICAL, {"process": process, "deaths": deaths, "last": last, "detail": detail})
            for process, deaths, last, detail in run.rows(_CRASH_LOOPS, {"seconds": _DEATHS_SECONDS, "deaths": _DEATHS})
        ],
    )
    crashing: list[Judged] = []
    hanging: list[Judged] = []
    totals: dict[bool, int] = {}
    for hung, group, message, key, deaths, age, evidence, total in run.rows(_SUSPECTS, {"limit": EVIDENCE}):
        totals[hung] = total
        fact: Fact = {
            "group": group,
            "message": message,
            "key": key,
            "deaths": deaths,
            "suspected_seconds": age,
            "evidence": evidence,
        }
        (hanging if hung else crashing).append((Severity.CRITICAL if deaths else Severity.WARNING, fact))
    for found in (*condition("suspects", crashing), *condition("hung_handlers", hanging)):
        yield Condition(found.name, found.severity, found.evidence, totals[found.name == "hung_handlers"])
    yield from condition(
        "outage",
        [
            (
                Severity.WARNING,
                {"group": group, "topic": topic, "consumers": count, "since_seconds": age, "error": error},
            )
            for group, topic, count, age, error in run.rows(_OUTAGES)
        ],
    )
