"""Work that is done every so often: what Celery beat, or a worker of ours, is given to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class PeriodicPass:
    """A bounded pass to run every `interval_seconds`; `run` returns what it counted."""

    name: str
    interval_seconds: float
    run: Callable[[], Mapping[str, Any]]
