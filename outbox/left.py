"""What a broker has not finished yet: asked by whoever moves away from it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LeftoverWork:
    """What one look found, in words: `waiting` goes away while workers run, `staying` waits for an operator.

    `written` is how much was ever written where it looked, for an engine that cannot look everywhere at one moment:
    where two looks found nothing and it is the same, nothing was under way between the places. 0 for one snapshot.
    """

    waiting: list[str] = field(default_factory=list)
    staying: list[str] = field(default_factory=list)
    written: int = 0
