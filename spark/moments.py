"""Times as people write them."""

from __future__ import annotations

from datetime import UTC, datetime

from .errors import UsageProblem


def parse_moment(value: str) -> datetime:
    """An ISO 8601 time; without an offset it is UTC. Raises UsageProblem."""
    try:
        moment = datetime.fromisoformat(value)
    except ValueError as error:
        raise UsageProblem(f"{value!r} is not a time: write ISO 8601, as in 2025-06-01T00:00:00+00:00.") from error
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
