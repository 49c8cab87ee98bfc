"""The options of a run, and parsers for times and durations as people write them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from .errors import UsageProblem

_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """The options of the command, after parsing.

    Without `since` and `until`, a run judges the rows from the end of the previous result's window on (the previous
    result is in the folder `output`). The first run, and a run with `full`, reads everything. With `since` and `until`,
    a run judges exactly this interval, and carries no subject over to a later run. With `look_back`, a run judges again
    the rows of the last `look_back` seconds before the end of its window, even if no rule's look back is due; 0 stands
    for the look back of each rule.
    """

    rules: Path
    output: str
    since: datetime | None = None
    until: datetime | None = None
    full: bool = False
    look_back: float | None = None
    metrics: Path | None = None

    def __post_init__(self) -> None:
        """Raise UsageProblem if options exclude each other."""
        if (self.since is None) != (self.until is None):
            raise UsageProblem("--from and --to belong together (since and until): give both, or neither.")
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise UsageProblem(f"--from {self.since.isoformat()} is not before --to {self.until.isoformat()}.")
        if self.look_back is not None and (self.full or self.since is not None):
            raise UsageProblem(
                "--look-back cannot be combined with --full or --from, which judge old rows anyway. Leave it out."
            )

    @property
    def is_interval(self) -> bool:
        """Whether the options contain `since` and `until`. A scheduler with data intervals gives these options."""
        return self.since is not None


def parse_moment(value: str) -> datetime:
    """Parse a time in ISO 8601. If the text has no UTC offset, the time is in UTC. Raises UsageProblem for any other
    text."""
    try:
        moment = datetime.fromisoformat(value)
    except ValueError as error:
        raise UsageProblem(f"{value!r} is not a time: write ISO 8601, as in 2025-06-01T00:00:00+00:00.") from error
    return in_utc(moment)


def in_utc(moment: datetime) -> datetime:
    """Return the same moment in UTC. A moment without an offset is in UTC already."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def parse_span(text: str) -> float:
    """The seconds of a duration such as 7d or 1m. Raises UsageProblem for any other text, and for 0."""
    seconds = parse_duration(text)
    if not seconds:
        raise UsageProblem(
            f"{text!r} is not a duration: write a number and a unit, as in 30s, 1m or 7d, at most 36500d."
        )
    return seconds


def parse_duration(text: str) -> float | None:
    """The seconds of a duration such as 5m or 7d.

    For a text that is not a number with a unit, and for more than 36500d, the result is None.
    """
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match is not None else math.inf
    return seconds if seconds <= 36_500 * _UNITS["d"] else None
