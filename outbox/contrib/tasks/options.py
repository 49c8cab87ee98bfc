"""The options of the backend for Django's tasks: the keys of TASKS[alias]["OPTIONS"] are names of fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outbox.contrib.django.settings.definition import Rule, or_none, seconds, setting, text, whole, wrong


def _delays(where: str, value: Any) -> Sequence[float]:
    allowed = "a list of numbers of seconds that is not empty"
    if not isinstance(value, (list, tuple)) or not value:
        raise wrong(where, value, allowed)
    return [seconds(0).check(f"{where}[{place}]", one) for place, one in enumerate(value)]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOptions:
    """The options of the backend for Django's tasks."""

    topic: str = setting(
        "tasks", text("topic"), meaning="the topic of the task messages. Each backend needs a topic of its own"
    )
    threads: int = setting(
        8, whole(1, "tasks"), meaning="how many tasks of one queue run at the same time in one process"
    )
    timeout_seconds: float = setting(15 * 60.0, seconds(0.01), meaning="how long a task may run")
    max_attempts: int | None = setting(
        1, or_none(whole(1, "attempts")), meaning="the maximum number of attempts of a failing task; `None`: no limit"
    )
    delays_seconds: Sequence[float] = setting(
        (10.0, 60.0, 600.0),
        Rule("a list of numbers of seconds, each at least 0", _delays, "seconds"),
        meaning="the waits between the attempts of a failing task; the last wait is used for all further attempts",
    )
