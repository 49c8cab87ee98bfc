"""PostgreSQL's snapshots as values: the transactions that a reader could see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All transactions below `xmax` were visible except those `in_progress`; none from `xmax` on was."""

    xmin: int
    xmax: int
    in_progress: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text form of pg_snapshot, `xmin:xmax:xip,…`."""
        xmin, xmax, in_progress = text.split(":")
        return cls(int(xmin), int(xmax), tuple(map(int, in_progress.split(","))) if in_progress else ())

    @property
    def text(self) -> str:
        """The text form of pg_snapshot."""
        return f"{self.xmin}:{self.xmax}:{','.join(map(str, self.in_progress))}"

    def sees(self, xid: int) -> bool:
        """Whether a transaction was visible."""
        return xid < self.xmax and xid not in self.in_progress
