"""What one run was asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch of a continuous reconciliation: the query's id, which outlives restarts, and its number."""

    query: str
    number: int

    def is_in(self, result: dict[str, Any] | None) -> bool:
        """Whether a result was published by this batch, or by a later one of its query."""
        known = None if result is None else result.get("batch")
        return known is not None and known["query"] == self.query and known["number"] >= self.number


@dataclass(frozen=True, slots=True)
class LookBack:
    """How far to look back at what earlier runs have judged; None: as far as each rule says."""

    seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """The command's options as values.

    Without `since` and `until` a run continues where the result in `output` ended (or reads everything, the first
    time and with `full`). With them it judges exactly that interval and nothing is carried over. With `look_back` it
    judges again what earlier runs have judged, whether a look back of the rules is due or not. `batch` is given by a
    continuous reconciliation, with `no_later_than`: what came after it is left to the next batch.
    """

    rules: Path
    output: str
    since: datetime | None = None
    until: datetime | None = None
    full: bool = False
    look_back: LookBack | None = None
    metrics: Path | None = None
    batch: Batch | None = None
    no_later_than: datetime | None = None

    @property
    def is_interval(self) -> bool:
        """Whether the window was given, as a scheduler with data intervals does."""
        return self.since is not None
