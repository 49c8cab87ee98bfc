"""Due moments of cron expressions at both changes of the clock, compared with a calendar that is read by minutes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.contrib.schedules.cron import Cron
from outbox.errors import ConfigurationError

MINUTE = timedelta(minutes=1)


# A local time, and the next due moments after it.
CHANGES_OF_THE_CLOCK = [
    # A fixed time that the clock skips is due when the clock has moved; two in the same gap are due once.
    ("30 2 * * *", "Europe/Berlin", "2027-03-27T12:00", ["2027-03-28T03:00+02:00", "2027-03-29T02:30+02:00"]),
    # Lord Howe moves its clock by half an hour, from 02:00 to 02:30.
    ("15 2 * * *", "Australia/Lord_Howe", "2027-10-02T12:00", ["2027-10-03T02:30+11:00", "2027-10-04T02:15+11:00"]),
    (
        *("0,30 2,3 * * *", "Europe/Berlin", "2027-03-27T12:00"),
        ["2027-03-28T03:00+02:00", "2027-03-28T03:30+02:00", "2027-03-29T02:00+02:00"],
    ),
    # A fixed time that the clock shows twice is due the first time.
    ("30 2 * * *", "Europe/Berlin", "2027-10-30T12:00", ["2027-10-31T02:30+02:00", "2027-11-01T02:30+01:00"]),
    ("45 1 * * *", "Australia/Lord_Howe", "2027-04-03T12:00", ["2027-04-04T01:45+11:00", "2027-04-05T01:45+10:30"]),
    # A repeated time is due whenever the clock shows it.
    (
        *("*/30 2 * * *", "Europe/Berlin", "2027-10-30T12:00"),
        ["2027-10-31T02:00+02:00", "2027-10-31T02:30+02:00", "2027-10-31T02:00+01:00", "2027-10-31T02:30+01:00"],
    ),
    ("30 * * * *", "Europe/Berlin", "2027-03-28T01:00", ["2027-03-28T01:30+01:00", "2027-03-28T03:30+02:00"]),
    (
        *("45 * * * *", "Australia/Lord_Howe", "2027-04-04T01:40"),
        ["2027-04-04T01:45+11:00", "2027-04-04T01:45+10:30", "2027-04-04T02:45+10:30"],
    ),
]


def test_the_due_moments_at_a_change_of_the_clock() -> None:
    for expression, timezone, after, moments in CHANGES_OF_THE_CLOCK:
        zone = ZoneInfo(timezone)
        found = Cron(expression, timezone).after(datetime.fromisoformat(after).replace(tzinfo=zone))
        local = [due.astimezone(zone).isoformat(timespec="minutes") for due in islice(found, len(moments))]
        assert local == moments, (expression, timezone)


def test_the_second_showing_of_a_fixed_time_is_over_when_asked_between_both() -> None:
    between = datetime(2027, 10, 31, 1, 15, tzinfo=UTC)  # 02:15 for the second time in Berlin
    assert Cron("30 2 * * *", "Europe/Berlin").next(between) == datetime(2027, 11, 1, 1, 30, tzinfo=UTC)


def test_an_expression_that_is_not_allowed_is_named() -> None:
    for expression, says in (
        ("61 * * * *", "Bad minute"),
        ("* * * *", "4 fields"),
        ("* * * * * *", "6 fields"),
        ("@daily", "1 fields"),
        ("0 0 30 2 *", "Bad day-of-month"),
        ("* * */20 * 1L", "no date in 50 years"),
    ):
        with pytest.raises(ConfigurationError, match=says) as raised:
            Cron(expression, "UTC")
        assert repr(expression) in str(raised.value)


def test_an_unknown_time_zone_is_named() -> None:
    for name in ("Mars/Olympus", "", "Europe", "../etc/passwd"):
        with pytest.raises(ConfigurationError, match="time zone"):
            Cron("0 3 * * *", name)


def test_the_latest_due_moment_is_found_in_a_short_and_in_a_long_span() -> None:
    until = datetime(2027, 3, 28, 12, tzinfo=UTC)
    ancient = datetime(2000, 1, 1, tzinfo=UTC)
    assert Cron("* * * * *", "UTC").latest(ancient, until).moments == [until]
    assert Cron("0 0 29 2 *", "UTC").latest(ancient, until).moments == [datetime(2024, 2, 29, tzinfo=UTC)]
    assert Cron("0 3 * * *", "UTC").latest(until - timedelta(hours=8), until).moments == []


@pytest.mark.parametrize("expression", ["* * * * *", "0 * * * *", "0 3 * * *", "0 3 1 * *", "* * 1 1 *"])
def test_the_latest_due_moments_of_a_long_time_are_found_without_reading_all_of_it(
    expression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since the year 2000, a schedule of each minute has been due 14 million times."""
    until = datetime(2027, 3, 28, 12, tzinfo=UTC)
    begin = datetime(2000, 1, 1, tzinfo=UTC)
    read = 0
    walls = Cron._walls

    def counted(cron: Cron, start: datetime) -> Iterator[datetime]:
        nonlocal read
        for wall in walls(cron, start):
            read += 1
            yield wall

    monkeypatch.setattr(Cron, "_walls", counted)
    cron = Cron(expression, "UTC")
    found = cron.latest(begin, until, 1000)
    assert read < 10_000
    assert found.moments == sorted(set(found.moments))
    late = list(takewhile(lambda due: due <= until, cron.after(found.moments[0] - MINUTE)))
    assert late == found.moments
    assert len(late) == 1000 or next(cron.after(begin)) == late[0]


def test_the_latest_due_moments_say_how_many_were_left_out() -> None:
    until = datetime(2027, 3, 28, 12, tzinfo=UTC)
    found = Cron("* * * * *", "UTC").latest(until - 30 * MINUTE, until, 10)
    assert (found.moments[0], found.moments[-1], found.dropped) == (until - 9 * MINUTE, until, 20)


# -- a calendar that is read minute by minute ------------------------------------------------------


@dataclass(frozen=True)
class Fields:
    """The values that match, and how the fields are written."""

    minutes: tuple[int, ...] | int
    hours: tuple[int, ...] | int
    weekdays: tuple[int, ...] | None

    @property
    def expression(self) -> str:
        weekdays = "*" if self.weekdays is None else ",".join(map(str, self.weekdays))
        return f"{_written(self.minutes)} {_written(self.hours)} * * {weekdays}"

    @property
    def is_fixed(self) -> bool:
        return isinstance(self.minutes, tuple) and isinstance(self.hours, tuple)

    def matches(self, wall: datetime) -> bool:
        return (
            _matches(self.minutes, wall.minute)
            and _matches(self.hours, wall.hour)
            and (self.weekdays is None or wall.isoweekday() % 7 in self.weekdays)
        )


def _written(values: tuple[int, ...] | int) -> str:
    return ",".join(map(str, values)) if isinstance(values, tuple) else "*" if values == 1 else f"*/{values}"


def _matches(values: tuple[int, ...] | int, value: int) -> bool:
    return value in values if isinstance(values, tuple) else value % values == 0


def by_minutes(fields: Fields, zone: ZoneInfo, after: datetime, until: datetime) -> Iterator[datetime]:
    """The due moments, from the clock's face at each minute of real time."""
    faces: dict[datetime, datetime] = {}
    begin = after - timedelta(days=2)
    previous = (begin - MINUTE).astimezone(zone).replace(tzinfo=None, fold=0)
    found = set()
    moment = begin
    while moment <= until:
        face = moment.astimezone(zone).replace(tzinfo=None, fold=0)
        if fields.is_fixed:
            skipped = previous + MINUTE
            while skipped < face:
                if fields.matches(skipped):
                    found.add(moment)
                skipped += MINUTE
            if fields.matches(face) and face not in faces:
                found.add(moment)
        elif fields.matches(face):
            found.add(moment)
        faces.setdefault(face, moment)
        previous = max(face, previous) if fields.is_fixed else face
        moment += MINUTE
    return iter(sorted(one for one in found if after < one <= until))


def values(most: int) -> st.SearchStrategy[tuple[int, ...] | int]:
    listed = st.lists(st.integers(0, most), min_size=1, max_size=3, unique=True).map(lambda one: tuple(sorted(one)))
    return st.one_of(listed, st.sampled_from([1, 2, 7, 15]))


FIELDS = st.builds(
    Fields,
    minutes=values(59),
    hours=st.one_of(values(23), st.sampled_from([(1,), (2,), (1, 2), (2, 3)])),
    weekdays=st.one_of(st.none(), st.just((0,)), st.just((0, 1, 6))),
)
# Each date is a few hours before or after a change of the clock somewhere, or an ordinary day.
BEGINS = st.builds(
    lambda day, minutes: day + timedelta(minutes=minutes),
    st.sampled_from(
        [
            datetime(year, month, day, tzinfo=UTC)
            for year, month, day in [
                *[(2027, 3, 27), (2027, 3, 28), (2027, 10, 30), (2027, 10, 31), (2027, 4, 3), (2027, 10, 2)],
                *[(2027, 11, 6), (2027, 3, 13), (2011, 12, 29), (2026, 6, 1)],
            ]
        ]
    ),
    st.integers(0, 2 * 24 * 60),
)
ZONES = st.sampled_from(
    ["Europe/Berlin", "Australia/Lord_Howe", "America/New_York", "Antarctica/Troll", "Pacific/Apia", "UTC"]
)


@settings(max_examples=25, deadline=None)
@given(fields=FIELDS, timezone=ZONES, begin=BEGINS)
def test_due_moments_are_those_of_a_clock_that_is_read_every_minute(
    fields: Fields, timezone: str, begin: datetime
) -> None:
    until = begin + timedelta(days=2)
    found = takewhile(lambda due: due <= until, Cron(fields.expression, timezone).after(begin))
    assert list(found) == list(by_minutes(fields, ZoneInfo(timezone), begin, until))
