"""The conditions of the application, as a test gives them in place of the declared ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from outbox.broker.operations.conditions import NO_LIST, Condition, Shown, Threshold
from outbox.contrib.django.operations import known_conditions


@dataclass(frozen=True)
class Given:
    """It stands where a DeclaredCondition stands."""

    found: Callable[[], Iterable[Condition]]
    thresholds: tuple[Threshold, ...] = ()
    subject: tuple[str, ...] = ("saga",)
    shown: Shown = NO_LIST

    def evaluate(self, state: Any) -> list[Condition]:
        return list(self.found())


def give(monkeypatch: pytest.MonkeyPatch, **given: Callable[[], Iterable[Condition]]) -> None:
    """From now on, only these conditions of the application are looked at."""
    made = {name: Given(found) for name, found in given.items()}
    monkeypatch.setattr(known_conditions, "application_conditions", lambda: made)
