"""Periodic work of a service, whoever runs it: Celery beat, or a loop of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class PeriodicPass:
    """A bounded pass to run every `interval_seconds`; `run` returns what it counted."""

    name: str
    run: Callable[[], Mapping[str, Any]]
    interval_seconds: float
