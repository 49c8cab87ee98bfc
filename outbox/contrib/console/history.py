"""The figures of the diagrams: a point per stored summary."""

from __future__ import annotations

from typing import Final

from outbox.broker.database.executor import Executor, Row
from outbox.broker.database.statement import Statement
from outbox.broker.operations.summary import KEPT_SECONDS

# The totals of all groups, and the figures of a group or of all groups together.
_HISTORY: Final = Statement("""
SELECT extract(epoch FROM at)::double precision,
       CASE WHEN %(group)s::text IS NULL THEN totals -> 'stored' END,
       CASE WHEN %(group)s::text IS NULL THEN totals -> 'queued' END,
       CASE WHEN %(group)s::text IS NULL THEN totals -> 'all' ELSE totals -> 'groups' -> %(group)s::text END
FROM {schema}.summary WHERE at > clock_timestamp() - make_interval(secs => %(kept)s) ORDER BY summary_id
""")
_CLOCK: Final = Statement("SELECT extract(epoch FROM clock_timestamp())::double precision")
_FIGURES: Final = ("handled", "sent_back", "dead", "lag", "oldest_seconds")


def summary_history(run: Executor, group: str | None = None) -> tuple[float, list[Row]]:
    """Return the time now, and a point per summary of the last KEPT_SECONDS, the oldest first.

    A point has the main figures of one group or of all groups together. The counters are totals. `stored` counts the
    assigned log ids: one for each stored message, and one for each insert that was rolled back. `stored` and `queued`
    are None for a single group. `oldest_seconds`: the waiting time of the oldest unfinished message; 0 if there is
    none. Neither `lag` nor `oldest_seconds` includes retries.
    """
    points = [
        Row(at=at, stored=stored, queued=queued, **dict(zip(_FIGURES, figures, strict=True)))
        for at, stored, queued, figures in run.rows(_HISTORY, {"group": group, "kept": KEPT_SECONDS})
        if figures
    ]
    return run.one(_CLOCK)[0], points
