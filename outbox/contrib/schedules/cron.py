"""Cron expressions in a time zone: the moments at which a schedule is due.

The package cronsim reads the expression and lists the matching wall clock times. This module turns each wall clock time
into moments, because only this step knows the changes of the time zone: cronsim misses moments in zones that move by
half an hour (`45 * * * *` on Lord Howe).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from outbox.errors import ConfigurationError

_FIELDS: Final = 5
_MINUTE: Final = timedelta(minutes=1)
# No time zone has moved its clock by more than a day at once.
_LONGEST_CHANGE: Final = timedelta(days=1)
# `latest` searches this span before `until`, and then longer ones.
_FIRST_SPAN: Final = timedelta(hours=1)
_SPAN_GROWS: Final = 4


@dataclass(frozen=True, slots=True)
class Latest:
    """The last due moments of a span, in ascending order, and how many earlier ones were found at least."""

    moments: list[datetime]
    dropped: int


@dataclass(frozen=True, slots=True)
class Cron:
    """A cron expression with five fields, and the IANA name of its time zone.

    An expression has a fixed time of day if neither its minute nor its hour begins with `*`. A fixed time of day that
    the clock skips is due when the clock has moved. A fixed time of day that the clock shows twice is due the first
    time. Every other expression is due whenever the clock shows a matching time. These are the rules of Debian's cron.

    Raises ConfigurationError if the expression or the time zone is not allowed, or if no date matches the expression.
    """

    expression: str
    timezone: str

    def __post_init__(self) -> None:
        fields = self.expression.split()
        if len(fields) != _FIELDS:
            raise ConfigurationError(
                f"the cron expression {self.expression!r} has {len(fields)} fields instead of {_FIELDS}: write minute, "
                "hour, day of month, month and day of week, for example '0 3 * * *'."
            )
        self._zone()
        try:
            matching = next(self._walls(datetime(2000, 1, 1)), None)  # noqa: DTZ001
        except (CronSimError, AssertionError, ValueError, IndexError) as error:
            raise ConfigurationError(
                f"the cron expression {self.expression!r} is not allowed: {str(error) or 'it cannot be read'}. The "
                "fields are minute, hour, day of month, month and day of week, for example '0 3 * * *'."
            ) from error
        if matching is None:
            raise ConfigurationError(
                f"the cron expression {self.expression!r} matches no date in 50 years: correct its day, month and day "
                "of week."
            )

    def after(self, moment: datetime) -> Iterator[datetime]:
        """Yield the due moments after an aware moment, in UTC and in ascending order."""
        zone = self._zone()
        begin = moment.astimezone(zone)
        if (moment - _LONGEST_CHANGE).astimezone(zone).utcoffset() != (moment + _LONGEST_CHANGE).astimezone(
            zone
        ).utcoffset():
            # The clock may show an earlier wall clock time again after `moment`.
            begin -= _LONGEST_CHANGE
        found: list[datetime] = []
        last = moment
        for wall in self._walls(begin.replace(tzinfo=None)):
            # No later wall clock time has a moment before `first`, so the moments up to `first` are complete.
            first = _first_moment(wall, zone)
            for due in [first] if self._has_fixed_time else _moments(wall, zone):
                heapq.heappush(found, due)
            while found and found[0] <= first:
                due = heapq.heappop(found)
                if due > last:
                    last = due
                    yield due
        yield from (due for due in sorted(set(found)) if due > last)

    def next(self, moment: datetime) -> datetime | None:
        """Return the first due moment after `moment`, or None if no date in the next 50 years matches."""
        return next(self.after(moment), None)

    def latest(self, begin: datetime, until: datetime, count: int = 1) -> Latest:
        """Return the last `count` due moments after `begin` and not after `until`.

        A long time since `begin` costs no more than a short one: the search begins with a span before `until`, which
        grows until it has `count` due moments.
        """
        span = _FIRST_SPAN
        while True:
            start = max(begin, until - span) if span < until - begin else begin
            found: deque[datetime] = deque(maxlen=count)
            dropped = 0
            for due in self.after(start):
                if due > until:
                    break
                dropped += len(found) == count
                found.append(due)
            if len(found) == count or start == begin:
                return Latest(list(found), dropped)
            span *= _SPAN_GROWS

    @property
    def _has_fixed_time(self) -> bool:
        minute, hour = self.expression.split()[:2]
        return not minute.startswith("*") and not hour.startswith("*")

    def _walls(self, begin: datetime) -> Iterator[datetime]:
        """Yield the matching wall clock times after `begin`, without a time zone."""
        return iter(CronSim(self.expression, begin))

    def _zone(self) -> ZoneInfo:
        try:
            return ZoneInfo(self.timezone)
        except (KeyError, ValueError, OSError) as error:
            raise ConfigurationError(
                f"the time zone {self.timezone!r} is unknown on this machine: write an IANA name, for example "
                "'Europe/Berlin'. If the machine has no time zones, install the package tzdata."
            ) from error


def _moments(wall: datetime, zone: ZoneInfo) -> list[datetime]:
    """Return the moments at which the clock shows `wall`: none, one or two."""
    both = {wall.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1)}
    return sorted(one for one in both if one.astimezone(zone).replace(tzinfo=None, fold=0) == wall)


def _first_moment(wall: datetime, zone: ZoneInfo) -> datetime:
    """Return the first moment at which the clock shows `wall`. If the clock skips `wall`, return the end of the gap."""
    while not (moments := _moments(wall, zone)):
        wall += _MINUTE
    return moments[0]
