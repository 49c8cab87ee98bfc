"""The condition of the part `events`: messages of an event wait for newer code."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.operations.conditions import Concern, Declarations, Judged, Severity
from outbox.broker.operations.state import BrokerState

CONDITIONS: Final = Declarations[BrokerState]()

# While a message waits, its consumer meets it again at least once a minute (LONGEST_WAIT_SECONDS), so a report that is
# older than three minutes does not count.
_UNKNOWN_VERSIONS: Final = Statement("""
SELECT consumer_group.name AS group, topic.name AS topic, event, version, count(*) AS consumers,
       max(extract(epoch FROM clock_timestamp() - since))::double precision AS since_seconds,
       (array_agg(error ORDER BY seen_at DESC))[1] AS error
FROM {schema}.unknown_version JOIN {schema}.consumer_group USING (group_id) JOIN {schema}.topic USING (topic_id)
WHERE seen_at > clock_timestamp() - interval '180 seconds'
  AND EXISTS (SELECT FROM {schema}.consumer
              WHERE consumer.instance_id = unknown_version.instance_id AND expires_at > clock_timestamp())
GROUP BY 1, 2, 3, 4 ORDER BY since_seconds DESC
""")


def _unknown_versions(run: Executor) -> list[dict[str, Any]]:
    return run.objects(dict, _UNKNOWN_VERSIONS)


@CONDITIONS.declare(
    meaning="Messages of an event wait, because newer code has published them and the workers do not know their "
    "version.",
    next_step="Deploy the workers with the code that declares this version. The messages then continue by themselves.",
    concern=Concern.PASSING,
    # Such messages leave their queue as if they were sent back, but have not failed.
    excuses=("retry_storm",),
)
def unknown_version(state: BrokerState) -> Iterable[Judged]:
    return [(Severity.WARNING, fact) for fact in state.once(_unknown_versions)]
