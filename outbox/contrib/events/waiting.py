"""Tells operators which versions of events wait for newer code: the table `unknown_version`, and a condition."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from outbox.broker.consumer.call import Result
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.operations.conditions import NO_LIST, Concern, Declarations, Judged, Severity, Symptom
from outbox.broker.operations.state import BrokerState
from outbox.events import UnknownEventVersion
from outbox.utils.safe_text import shown_text

logger = logging.getLogger(__name__)

_REPORT_SECONDS: Final = 10.0
# Publishers choose the names of events, so their number has no limit. A process remembers and reports at most this
# number of unknown versions of a subscription; a version that is not met any more makes room for another.
_MOST_VERSIONS: Final = 100
_FORGOTTEN_AFTER_SECONDS: Final = 180.0
_LONGEST_NAME: Final = 200
_LONGEST_TEXT: Final = 1_000

# A consumer meets a waiting message again at least once a minute. The rows of versions that it no longer meets are
# deleted, because publishers may use any number of names.
_REPORT: Final = Statement("""
WITH over AS (
    DELETE FROM {schema}.unknown_version u
    WHERE u.instance_id = %(instance)s AND u.seen_at < clock_timestamp() - interval '10 minutes'
      AND (u.event, u.version) <> (%(event)s, %(version)s)
)
INSERT INTO {schema}.unknown_version AS known (instance_id, group_id, topic_id, event, version, error)
VALUES (%(instance)s, %(group_id)s, %(topic_id)s, %(event)s, %(version)s, %(error)s)
ON CONFLICT (instance_id, group_id, topic_id, event, version) DO UPDATE
SET error = excluded.error, seen_at = clock_timestamp()
""")
_FORGET: Final = Statement(
    "DELETE FROM {schema}.unknown_version WHERE group_id = %(group_id)s AND topic_id = %(topic_id)s"
)
_FORGET_INSTANCE: Final = Statement("DELETE FROM {schema}.unknown_version WHERE instance_id = %(instance)s")
_FORGET_THE_DEAD: Final = Statement(
    "DELETE FROM {schema}.unknown_version WHERE seen_at < clock_timestamp() - interval '1 day'"
)
# The error is about a declaration, so it is erased only if it contains one of the texts. The type of the error stays.
_ERASE: Final = Statement("""
UPDATE {schema}.unknown_version
SET error = coalesce(substring(error FROM '^[A-Za-z_][A-Za-z0-9_]*:') || ' ', '') || '(erased)'
WHERE right(error, 8) <> '(erased)' AND error LIKE ANY(%(patterns)s::text[])
""")


class UnknownVersions:
    """The versions of events that one subscription has met and does not know. Only the dispatching thread uses it."""

    def __init__(self) -> None:
        # The versions that the next `report` stores.
        self.met: Final[dict[tuple[str, int], str]] = {}
        self._reported_at: dict[tuple[str, int], float] = {}

    def note(self, results: Sequence[Result]) -> None:
        """Record the unknown versions among the results of a call."""
        for result in results:
            if isinstance(result, UnknownEventVersion):
                version = result.event[:_LONGEST_NAME], result.version
                if version in self.met or len(self.met) < _MOST_VERSIONS:
                    self.met[version] = shown_text(result)[:_LONGEST_TEXT]

    def report(self, run: Executor, instance: UUID, key: tuple[int, int]) -> None:
        """Store for operators which versions wait; each version at most once per ten seconds."""
        if not self.met:
            return
        now = time.monotonic()
        kept = {one: at for one, at in self._reported_at.items() if now - at < _FORGOTTEN_AFTER_SECONDS}
        self._reported_at = kept
        for (event, version), error in self.met.items():
            is_due = now - kept.get((event, version), -_REPORT_SECONDS) >= _REPORT_SECONDS
            if is_due and ((event, version) in kept or len(kept) < _MOST_VERSIONS):
                kept[event, version] = now
                logger.warning("group %d: messages wait: %s", key[0], error)
                parameters = {"event": event, "version": version, "error": error}
                run.execute(_REPORT, {"instance": instance, **_of(key), **parameters})
        self.met.clear()


def forget(run: Executor, key: tuple[int, int]) -> None:
    """Remove all rows about a subscription, because it is deleted."""
    run.execute(_FORGET, _of(key))


def forget_instance(run: Executor, instance: UUID) -> None:
    """Remove the rows of an instance that has ended."""
    run.execute(_FORGET_INSTANCE, {"instance": instance})


def forget_the_dead(run: Executor) -> None:
    """Remove the rows that no instance has updated for a day."""
    run.execute(_FORGET_THE_DEAD)


def erase_errors(run: Executor, values: Mapping[str, Any]) -> int:
    """Erase the errors that contain one of the texts. Return their number."""
    return run.count(_ERASE, values)


def _of(key: tuple[int, int]) -> dict[str, int]:
    return {"group_id": key[0], "topic_id": key[1]}


# -- the condition -----------------------------------------------------------------------------------

CONDITIONS: Final = Declarations[BrokerState]()

# A consumer meets a waiting message again at least once a minute, so a report older than three minutes does not count.
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


@CONDITIONS.declare(
    meaning="Messages of an event wait, because newer code has published them in a version that the workers do not "
    "know.",
    next_step="Deploy the workers with the code that declares this version "
    "(docs/events.md#deploy-two-versions-side-by-side). They then handle the waiting messages.",
    concern=Concern.PASSING,
    symptom=Symptom.STOPPED,
    # Such messages leave their queue as if they were sent back, but have not failed.
    excuses=("retry_storm",),
    shown=NO_LIST,
)
def unknown_version(state: BrokerState) -> Iterable[Judged]:
    return [(Severity.WARNING, fact) for fact in state.facts(_UNKNOWN_VERSIONS)]
