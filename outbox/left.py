"""What a broker has not finished, checked before a project moves to another engine."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LeftoverWork:
    """The findings of one look, as texts. Workers finish `waiting` by themselves; `staying` needs an operator.

    `written` is the count of all messages ever written to the places that were read. An engine without a snapshot
    compares it between two looks: if both found nothing and it did not change, no message moved between the places
    meanwhile. It is 0 for an engine that reads one snapshot.
    """

    waiting: list[str] = field(default_factory=list)
    staying: list[str] = field(default_factory=list)
    written: int = 0
