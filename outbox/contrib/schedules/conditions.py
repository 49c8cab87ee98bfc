"""The condition and the metric of the part `schedules`: how late the message of a schedule is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from outbox.broker.operations.conditions import Concern, Declarations, Judged, Place, Remedy, Shown, Symptom, Threshold
from outbox.broker.operations.state import BrokerState
from outbox.contrib.schedules import schedule
from outbox.contrib.schedules.schedule import clock, list_schedules

CONDITIONS: Final = Declarations[BrokerState]()
SCHEDULE_LATE_SECONDS: Final = Threshold("schedule_late_seconds", 60, 600, "seconds", "delay of a schedule's message")


@CONDITIONS.declare(
    meaning="The leader has not published the message of a schedule in time.",
    next_step="If the evidence contains an error, correct the declaration of the schedule, or declare its topic. "
    "Otherwise check the conditions `no_sequencer` and `process_failing`, and the log of the broker process.",
    concern=Concern.WAITING,
    symptom=Symptom.WAITING,
    thresholds=(SCHEDULE_LATE_SECONDS,),
    shown=Shown(
        listed=Place("schedules", "Schedules"),
        remedies=(
            Remedy("run_schedule", "Run now …", "plain", {"schedule": "schedule", "producer_group": "producer_group"}),
        ),
    ),
)
def schedule_late(state: BrokerState) -> Iterator[Judged]:
    now = schedule.clock(state.run)
    for one in schedule.list_schedules(state.run):
        late = one.late_seconds(now)
        named = {"schedule": one.name, "producer_group": one.producer_group, "topic": one.topic}
        yield state.judge(SCHEDULE_LATE_SECONDS, late), {**named, "late_seconds": late, "error": one.error}


METRICS: Final[Mapping[str, tuple[Sequence[str], str]]] = {
    "outbox_schedule_late_seconds": (
        ("producer_group", "schedule"),
        "Seconds since the first due moment without a message; 0 while no due moment has passed.",
    ),
}


def figures(state: BrokerState) -> Iterator[tuple[str, Sequence[tuple[Sequence[str], float]]]]:
    """Yield the name of each metric with its rows: the values of the labels, and the value."""
    now = clock(state.run)
    rows = [((one.producer_group, one.name), one.late_seconds(now)) for one in list_schedules(state.run)]
    yield "outbox_schedule_late_seconds", rows
