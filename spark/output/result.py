"""What a run came to: of each rule while it runs, and as `result.json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from ..comparison import classify
from ..options import Batch
from ..rules.rule import Rule
from ..sources.base import SourceBoundary
from ..stages import scan


@dataclass
class RuleRun:
    """What one rule came to."""

    rule: Rule
    window: classify.Window
    notes: list[str] = field(default_factory=list)
    scanned: scan.ScanResult | None = None
    skipped: int = 0
    suspects: int = 0
    counts: scan.Counts = field(default_factory=dict)
    volume: list[tuple[datetime, int]] = field(default_factory=list)
    looked_back: dict[str, str | None] | None = None

    def saw(self, *classes: classify.FindingClass) -> bool:
        """Whether the first look saw any of the classes."""
        assert self.scanned is not None
        return any(counts[name.value] for counts in self.scanned.counts.values() for name in classes)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHead:
    """What a result says of the run itself: `interval` in mode `interval` only, `batch` in a continuous one only."""

    title: str
    name: str
    mode: str
    interval: list[str] | None
    started: datetime
    batch: Batch | None


def compose(
    head: RunHead,
    runs: list[RuleRun],
    readings: list[SourceBoundary],
    confirmed_at: list[SourceBoundary],
    still_open: int,
) -> dict[str, Any]:
    """The contents of `result.json`. `still_open`: subjects that the next run looks at again."""
    totals = dict.fromkeys((name.value for name in classify.CLASSES), 0)
    for run in runs:
        for counts in run.counts.values():
            for name, count in counts.items():
                totals[name] += count
    faults = sum(totals[name.value] for name in classify.FAULTS)
    return {
        "version": 1,
        "title": head.title,
        "run": head.name,
        "mode": head.mode,
        "interval": head.interval,
        "batch": None if head.batch is None else asdict(head.batch),
        "status": "findings" if faults else "clean",
        "started_at": head.started.isoformat(),
        "finished_at": datetime.now(UTC).isoformat(),
        "snapshots": [_plain(reading) for reading in readings],
        "confirmed_by_snapshots": [_plain(reading) for reading in confirmed_at],
        "rules": [_of_rule(run) for run in runs],
        "totals": totals,
        "faults": faults,
        "open_subjects": still_open,
        "findings": f"runs/{head.name}/findings",
        "open": f"runs/{head.name}/open",
        "report": f"runs/{head.name}/report.html",
    }


def apart(faults: int, *, known: int, new: int) -> dict[str, Any]:
    """The findings that count apart from those that are acknowledged; `new`: those that no earlier result had."""
    return {
        "status": "findings" if faults > known else "clean",
        "faults": faults - known,
        "new_faults": new,
        "acknowledged": known,
    }


def shown(counts: scan.Counts) -> str:
    """Counts in one line."""
    texts = []
    for subject, classes in counts.items():
        found = ", ".join(f"{count} {name}" for name, count in classes.items() if count)
        texts.append(f"{subject or 'messages'}: {found or 'nothing'}")
    return "; ".join(texts)


def shown_totals(result: dict[str, Any]) -> str:
    """A result in one line."""
    found = ", ".join(f"{count} {name}" for name, count in result["totals"].items() if count)
    known = f" ({result['acknowledged']} of them acknowledged)" if result["acknowledged"] else ""
    return f"{result['status']}: {found or 'nothing judged'}{known}"


def _plain(reading: SourceBoundary) -> dict[str, Any]:
    return {
        name: value.isoformat() if isinstance(value, datetime) else value for name, value in asdict(reading).items()
    }


def _of_rule(run: RuleRun) -> dict[str, Any]:
    rule, window, scanned = run.rule, run.window, run.scanned
    assert scanned is not None
    return {
        "name": rule.name,
        "digest": rule.digest,
        "table": rule.table,
        "topic": rule.topic,
        "severity": rule.severity.value,
        "since": None if window.since is None else window.since.isoformat(),
        "until": window.until.isoformat(),
        "floor": None if window.floor is None else window.floor.isoformat(),
        "looked_back": run.looked_back,
        "watermark": window.watermark.isoformat(),
        "grace_seconds": rule.grace_seconds,
        "rows_read": scanned.rows,
        "messages_read": scanned.messages,
        "rows_equal_by_checksum": run.skipped,
        "keys_read_again": run.suspects,
        "counts": run.counts[""],
        "groups": {name: counts for name, counts in run.counts.items() if name},
        "notes": run.notes,
    }
