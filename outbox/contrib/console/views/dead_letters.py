"""The page of dead letters, counted by group and error."""

from __future__ import annotations

from typing import Final

from django.http import HttpRequest, HttpResponse

from outbox.broker.database.executor import Executor, Row
from outbox.broker.database.statement import Statement
from outbox.contrib.console.access import seeing
from outbox.contrib.console.asking import reading, text
from outbox.contrib.console.rendering import render
from outbox.contrib.console.tabs import state_tabs

# Only the errors of this many newest dead letters of a group are counted.
COUNTED: Final = 10_000
# The maximum number of rows that `list_errors` returns, for all groups together.
MOST_ERRORS: Final = 200

_ERRORS: Final = Statement("""
SELECT consumer_group.name AS group, split_part(newest.error, ':', 1) AS error_type, count(*) AS letters,
       min(dead_at) AS first_at, max(dead_at) AS last_at, (array_agg(newest.error ORDER BY dead_at DESC))[1] AS example,
       newest.is_cut
FROM {schema}.consumer_group
CROSS JOIN LATERAL (
    SELECT error, dead_at, count(*) OVER () > %(limit)s AS is_cut
    FROM (SELECT error, dead_at FROM {schema}.dead_letter
          WHERE dead_letter.group_id = consumer_group.group_id AND replayed_at IS NULL
          ORDER BY dead_at DESC LIMIT %(limit)s + 1) AS counted
    ORDER BY dead_at DESC LIMIT %(limit)s
) AS newest
WHERE %(group)s::text IS NULL OR consumer_group.name = %(group)s
GROUP BY 1, 2, newest.is_cut ORDER BY letters DESC, 1, 2
LIMIT %(most)s
""")


def list_errors(run: Executor, group: str | None = None) -> list[Row]:
    """Return the unsettled dead letters by group and type of the last error, the most frequent first.

    `example`: the newest error. `is_cut`: the group has more dead letters than are counted.
    """
    return run.objects(Row, _ERRORS, {"group": group, "limit": COUNTED, "most": MOST_ERRORS})


@seeing
def dead_letters(request: HttpRequest) -> HttpResponse:
    """The page with the errors of dead letters, most frequent first."""
    group = text(request.GET, "group")
    with reading() as run:
        tabs = state_tabs(run, group)
        errors = list_errors(run, group)
    context = {
        "title": "Dead letters",
        "errors": errors,
        "tabs": tabs,
        "state": "dead",
        "group": group,
        "counted": COUNTED,
        "cut_groups": sorted({one.group for one in errors if one.is_cut}),
        "most": MOST_ERRORS if len(errors) == MOST_ERRORS else None,
    }
    return render(request, "dead_letters", context)
