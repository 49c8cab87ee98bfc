"""What one run was asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """The command's options as values.

    Without `since` and `until` a run continues where the result in `output` ended (or reads everything, the first
    time and with `full`). With them it judges exactly that interval and nothing is carried over.
    """

    rules: Path
    output: str
    since: datetime | None = None
    until: datetime | None = None
    full: bool = False
    metrics: Path | None = None

    @property
    def is_interval(self) -> bool:
        """Whether the window was given, as a scheduler with data intervals does."""
        return self.since is not None
