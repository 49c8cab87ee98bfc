"""The findings of the result in force, for other programs: JSON, one per line. Needs neither Java nor a database."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice

from .errors import UsageProblem
from .store import Store


def lines(output: str, limit: int | None = None) -> Iterator[str]:
    """At most `limit` findings, ordered by rule, class, group and key, each with the name of its `run`.

    Times are ISO 8601 in UTC. Raises UsageProblem when there is no result in `output`.
    """
    store = Store(output)
    result = store.result()
    if result is None:
        raise UsageProblem(f"there is no result in {output}: run outbox-reconcile run --output {output} first.")
    for finding in islice(store.rows(result["findings"]), limit):
        yield json.dumps({"run": result["run"], **finding}, default=_plain, ensure_ascii=False)


def _plain(value: object) -> str:
    if isinstance(value, datetime):
        # Results of earlier versions have times as INT96: UTC, which readers other than Spark are not told.
        return value.replace(tzinfo=value.tzinfo or UTC).isoformat()
    return str(value)
