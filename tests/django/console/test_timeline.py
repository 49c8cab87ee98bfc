"""The timeline: which conditions held when and for which subject, and when no worker watched."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from outbox.broker.operations.conditions import Condition, Severity
from outbox.contrib.django.models import PastCondition, RaisedCondition
from outbox.contrib.django.operations import raised
from outbox.contrib.django.operations.timeline import read_timeline
from outbox.contrib.django.worker.periodic import passes
from tests.django.broker_world import World
from tests.django.given_conditions import give

pytestmark = pytest.mark.usefixtures("no_subscribers", "one_session")

NOW = timezone.now()


@pytest.fixture
def holds(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Condition]]:
    """The conditions that hold; those of the broker itself are left out by their names."""
    found: list[Condition] = []
    give(monkeypatch, saga_stalled=lambda: found)
    yield found
    RaisedCondition.objects.all().delete()
    PastCondition.objects.all().delete()


def stalled(saga: str, severity: Severity = Severity.WARNING) -> Condition:
    return Condition("saga_stalled", severity, [{"saga": saga}], 1)


def at(minutes: float) -> datetime:
    return NOW - timedelta(minutes=60) + timedelta(minutes=minutes)


def look(*minutes: float) -> None:
    """Run the pass at these times."""
    for one in minutes:
        raised.run_once(at(one))


def spans(until: float, since: float = 0.0) -> list[tuple[str, list[tuple[str, float, float, bool]]]]:
    """Of each subject: severity, beginning and end in minutes, and whether it holds."""

    def minutes(moment: datetime) -> float:
        return round((moment - at(0)).total_seconds() / 60, 2)

    found = read_timeline(at(since), at(until), containing="saga")
    return [
        (one.subject, [(s.severity.name, minutes(s.began_at), minutes(s.ended_at), s.holds) for s in one.spans])
        for one in found.histories
    ]


def test_a_condition_that_came_back_has_two_spans_and_its_highest_severity(holds: list[Condition]) -> None:
    holds.append(stalled("a"))
    look(0, 1)
    holds[0] = stalled("a", Severity.CRITICAL)
    look(2)
    holds[0] = stalled("a")
    look(3)
    holds.clear()
    look(4, 5)
    holds.append(stalled("a"))
    look(6, 7)
    assert spans(7.5) == [("saga a", [("CRITICAL", 0.0, 3.0, False), ("WARNING", 6.0, 7.5, True)])]
    # A span that ended before the chosen time is left out, and a span that began before it is not.
    assert spans(7.5, since=4) == [("saga a", [("WARNING", 6.0, 7.5, True)])]
    assert spans(7.5, since=2) == spans(7.5)


def test_what_nobody_watched_is_not_shown_as_calm(holds: list[Condition]) -> None:
    """The control is the time in which passes ran."""
    holds.append(stalled("a"))
    look(0, 0.5, 1)
    # No worker runs for nine minutes, and the condition ends meanwhile.
    holds.clear()
    look(10, 10.5, 11)
    found = read_timeline(at(-5), at(11.5))
    assert found.unwatched == [(at(-5), at(0)), (at(1), at(10))]
    assert spans(11.5) == [("saga a", [("WARNING", 0.0, 1.0, False)])], "until it was last seen"
    # While no pass runs, nothing is said to hold now.
    holds.append(stalled("b"))
    look(12)
    later = read_timeline(at(0), at(20), containing="saga b")
    assert later.unwatched[-1] == (at(12), at(20)) and not later.histories[0].holds
    assert later.watched_at == at(12) and not later.is_watched and found.is_watched


def test_the_page_agrees_with_the_cards_within_the_minute_in_which_a_condition_is_kept(
    holds: list[Condition], operator: Client
) -> None:
    """The passes alone keep a condition for a minute after its end, and do not know one that has just begun."""
    holds.append(stalled("a"))
    raised.run_once(timezone.now() - timedelta(seconds=30))
    raised.run_once(timezone.now() - timedelta(seconds=15))
    html = operator.get("/outbox/timeline/").content.decode()
    assert "1 condition holds now" in html and "holds now</span>" in html
    holds[:] = [stalled("b")]
    html = operator.get("/outbox/timeline/").content.decode()
    rows = {saga: html.partition(f'data-key="saga_stalled saga {saga}"')[2].partition("</tr>")[0] for saga in "ab"}
    assert "holds now" not in rows["a"] and "holds now" in rows["b"]
    assert "saga b" not in operator.get("/outbox/timeline/?state=over").content.decode()
    assert "saga b" not in operator.get("/outbox/timeline/?q=saga+a").content.decode()
    holds.clear()
    html = operator.get("/outbox/timeline/").content.decode()
    assert "No condition holds" in html and "holds now</span>" not in html and "saga a" in html


def test_the_page_says_that_nobody_records_now(holds: list[Condition], operator: Client) -> None:
    """What holds now is read for the page. The control is a pass that has just run."""
    raised.run_once(timezone.now() - timedelta(minutes=10))
    holds.append(stalled("a"))
    for span in ("15m", "7d"):
        html = operator.get(f"/outbox/timeline/?span={span}").content.decode()
        assert "It is unknown which conditions held until now" in html and "1 condition holds now" in html
    holds.clear()
    raised.run_once()
    html = operator.get("/outbox/timeline/").content.decode()
    assert "It is unknown" not in html and "No condition holds" in html


def test_the_history_stays_small(holds: list[Condition], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raised, "KEPT_ROWS", 5)
    old = at(0) - timedelta(days=8)
    PastCondition.objects.create(name="lag", subject="old", severity=1, raised_at=old, seen_at=old)
    for number in range(12):
        holds[:] = [stalled(str(number))]
        look(3 * number)
    assert PastCondition.objects.count() == 5
    assert set(PastCondition.objects.values_list("subject", flat=True)) <= {"", *(f"saga {n}" for n in range(12))}
    assert not PastCondition.objects.filter(subject="old").exists()


def test_one_process_of_the_service_runs_the_pass(world: World) -> None:
    [conditions] = [one for one in passes() if one.name == "conditions"]
    try:
        assert "changes" in conditions.run()
        # Another process of the service has just run it.
        assert "left_to" in conditions.run()
    finally:
        RaisedCondition.objects.all().delete()
        PastCondition.objects.all().delete()


def paths(html: str, kind: str) -> list[list[tuple[int, int]]]:
    found = re.findall(rf'<path class="{kind}" d="([^"]*)"', html)
    return [[(int(x), int(x) + int(w)) for x, w in re.findall(r"M(\d+) 0h(\d+)", path)] for path in found]


def past(subject: str, ended_minutes_ago: float, seconds: float, **more: Any) -> None:
    ended = timezone.now() - timedelta(minutes=ended_minutes_ago)
    given = {"name": "lag", "severity": Severity.WARNING, **more}
    PastCondition.objects.create(
        subject=subject, raised_at=ended - timedelta(seconds=seconds), seen_at=ended, **given
    )  # fmt: skip


def test_the_page_draws_each_span_and_filters(holds: list[Condition], operator: Client) -> None:
    past("group mail, topic orders", 30, 600)
    past("group mail, topic orders", 5, 60, severity=Severity.CRITICAL)
    past("group stock", 300, 60)
    holds.append(stalled("a"))
    raised.run_once()
    html = operator.get("/outbox/timeline/?span=1h").content.decode()
    assert html.index("saga a") < html.index("group mail") and "group stock" not in html
    # Forty of sixty minutes ago to thirty, and one minute that ended five minutes ago.
    [[(left, right)], _] = paths(html, "warning")[::-1][:2] if "saga" in html else [[], []]
    assert abs(left - 333) <= 3 and abs(right - 500) <= 3
    [[(left, right)]] = paths(html, "critical")
    assert abs(left - 900) <= 3 and abs(right - 917) <= 3
    assert paths(html, "unwatched")[0][0][0] == 0, "before the first pass"
    assert "/outbox/groups/one/?name=mail" in html and "2 times, for 11 min in all" in html
    over = operator.get("/outbox/timeline/?span=24h&state=over").content.decode()
    assert "group stock" in over and "saga a" not in over
    found = operator.get("/outbox/timeline/?span=24h&q=STOCK").content.decode()
    assert "group stock" in found and "group mail" not in found
    assert "No condition was recorded" in operator.get("/outbox/timeline/?span=24h&q=nothing").content.decode()
    # An unknown span is the shortest one.
    assert "group mail" in operator.get("/outbox/timeline/?span=1y").content.decode()


def test_a_full_timeline_is_small(holds: list[Condition], operator: Client) -> None:
    """Fifty rows, each of which came and went two hundred times."""
    began = timezone.now()
    PastCondition.objects.bulk_create(
        PastCondition(
            name="saga_stalled",
            subject=f"group consumer-group-{subject}, topic some-topic",
            severity=Severity.WARNING if number % 2 else Severity.CRITICAL,
            raised_at=began - timedelta(minutes=50 * number + subject % 7),
            seen_at=began - timedelta(minutes=50 * number - 2),
        )
        for subject in range(51)
        for number in range(1, 200)
    )
    html = operator.get("/outbox/timeline/?span=7d").content.decode()
    assert "Next page" in html and len(html.encode()) < 150_000


def test_the_page_says_by_when_a_condition_was_over(holds: list[Condition], operator: Client) -> None:
    """An operator ends a condition between the pass that saw it last and the next one."""
    now = timezone.now()
    holds.append(stalled("a"))
    for ago in (150, 135, 120):
        raised.run_once(now - timedelta(seconds=ago))
    holds.clear()
    for ago in (105, 90, 75, 60, 45, 30, 15):
        raised.run_once(now - timedelta(seconds=ago))
    over_by = timezone.localtime(now - timedelta(seconds=105))
    html = operator.get("/outbox/timeline/").content.decode()
    assert re.search(rf'<span class="quiet">over by <time [^>]+>{over_by:%H:%M:%S}</time></span>', html)
    PastCondition.objects.all().delete()
    RaisedCondition.objects.all().delete()
    holds.append(stalled("a"))
    raised.run_once(now - timedelta(seconds=600))
    holds.clear()
    html = operator.get("/outbox/timeline/").content.decode()
    assert "not watched afterwards" in html and "over by" not in html
