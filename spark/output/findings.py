"""The findings of the result in force, for other programs: JSON, one per line. Needs neither Java nor a database."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from itertools import islice

from ..errors import UsageProblem
from .store import Store


def lines(output: str, limit: int | None = None) -> Iterator[str]:
    """At most `limit` findings, ordered by rule, class, group and key, each with the name of its `run`.

    Times are ISO 8601 in UTC. All is ASCII, so that a line separator in a key ends no line. Raises UsageProblem when
    there is no result in `output`.
    """
    store = Store(output)
    result = store.result()
    if result is None:
        raise UsageProblem(f"there is no result in {output}: run outbox-reconcile run --output {output} first.")
    for finding in islice(store.rows(result["findings"]), limit):
        yield json.dumps({"run": result["run"], **finding}, default=_plain)


def _plain(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
