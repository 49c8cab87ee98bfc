"""The last stage: writes the report, then `result.json` (which puts the result in force), then the metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from ..common.errors import UsageProblem
from ..common.store import RESULT
from ..judging import causes
from ..rules.rule import CLASSES, FAULTS, Rules
from ..sources.base import SourceBoundary
from ..stages.findings import Findings, JudgedRule
from ..stages.job import Job
from ..stages.scan import Counts
from . import metrics, report

SAMPLES_PER_CAUSE: Final = 10
SHOWN_RUNS: Final = 10


def compose(
    job: Job,
    found: Findings,
    samples: Sequence[Mapping[str, Any]],
    snapshots: Sequence[SourceBoundary],
    confirmed_by: Sequence[SourceBoundary],
    previous: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The contents of `result.json`. `status` and `faults` do not count acknowledged findings.

    `last_runs` has the findings that were open after this run and the runs before, by class.
    """
    totals = dict.fromkeys((name.value for name in CLASSES), 0)
    for judged in found.rules:
        for counts in judged.counts.values():
            for name, count in counts.items():
                totals[name] += count
    left = {name.value: totals[name.value] for name in FAULTS}
    for cause in found.causes:
        left[cause.finding_class] = left.get(cause.finding_class, 0) - cause.first_acknowledged
    faults = sum(left.values())
    options, finished = job.options, datetime.now(UTC).isoformat()
    earlier = [] if previous is None else previous.get("last_runs", [])
    this = {"finished_at": finished, "open": {name: count for name, count in left.items() if count}}
    return {
        "version": 1,
        "title": job.rules.title,
        "run": job.name,
        "mode": "interval" if options.is_interval else "full" if options.full else "incremental",
        "interval": job.interval,
        "status": "findings" if faults else "clean",
        "is_tolerated": faults > 0 and _is_tolerated(found, job.rules),
        "started_at": job.started.isoformat(),
        "finished_at": finished,
        "last_runs": [*earlier, this][-SHOWN_RUNS:],
        "snapshots": [_plain(each) for each in snapshots],
        "confirmed_by_snapshots": [_plain(each) for each in confirmed_by],
        "rules": [_of_rule(judged) for judged in found.rules],
        "causes": causes.described(found.causes, samples, options.output, str(options.rules)),
        "totals": totals,
        "faults": faults,
        "open_subjects": found.still_open,
        "findings": f"runs/{job.name}/findings",
        "open": f"runs/{job.name}/open",
        "report": f"runs/{job.name}/report.html",
        "new_faults": found.new,
        "acknowledged": found.acknowledged,
    }


def _is_tolerated(found: Findings, rules: Rules) -> bool:
    """Whether the run succeeds in spite of its findings: each rule with a `fail_above` of its own by that, and all
    other rules together by that of the file."""
    left_faults = left_subjects = 0
    for judged in found.rules:
        rule = judged.confirmed.scanned.prepared.rule
        known = sum(cause.first_acknowledged for cause in found.causes if cause.rule == rule.name)
        counts = judged.counts.values()
        faults = sum(one[name.value] for one in counts for name in FAULTS) - known
        subjects = sum(count for one in counts for count in one.values())
        if rule.fail_above is None:
            left_faults, left_subjects = left_faults + faults, left_subjects + subjects
        elif not rule.fail_above.covers(faults, subjects):
            return False
    return rules.fail_above.covers(left_faults, left_subjects)


def publish(
    job: Job, result: dict[str, Any], samples: Sequence[dict[str, Any]], metrics_file: Path | None
) -> str | None:
    """Write the run's report, then the result, then the metrics. The result is in force once `result.json` is written.

    Returns an error text if report.html or metrics could not be written, else None. Raises UsageProblem if the result
    itself cannot be written; the previous result then stays in force.
    """
    text = report.render(result, samples)
    try:
        job.store.write(result["report"], text)
        job.store.write(RESULT, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UsageProblem(f"the result cannot be written: {error}. The previous result stays in force.") from error
    try:
        # Write these files after the result: they may be older than the result in force, but never newer.
        job.store.write("report.html", text)
        if metrics_file is not None:
            metrics.write(metrics_file, result, job.options.rules)
    except OSError as error:
        return f"the result is in force, but report.html or the metrics could not be written: {error}"
    return None


def shown(counts: Counts) -> str:
    """The counts as a text of one line."""
    texts = []
    for subject, classes in counts.items():
        found = ", ".join(f"{count} {name}" for name, count in classes.items() if count)
        texts.append(f"{subject or 'messages'}: {found or 'nothing'}")
    return "; ".join(texts)


def shown_totals(result: dict[str, Any]) -> str:
    """The totals of a result as a text of one line."""
    found = ", ".join(f"{count} {name}" for name, count in result["totals"].items() if count)
    known = f" ({result['acknowledged']} of them acknowledged)" if result["acknowledged"] else ""
    return f"{result['status']}: {found or 'nothing judged'}{known}"


def _plain(reading: SourceBoundary) -> dict[str, Any]:
    return {
        name: value.isoformat() if isinstance(value, datetime) else value for name, value in asdict(reading).items()
    }


def _of_rule(judged: JudgedRule) -> dict[str, Any]:
    scanned = judged.confirmed.scanned
    rule, window = scanned.prepared.rule, scanned.prepared.window
    return {
        "name": rule.name,
        "digest": rule.digest,
        "table": rule.table,
        "topic": rule.topic,
        "severity": rule.severity.value,
        "since": None if window.since is None else window.since.isoformat(),
        "until": window.until.isoformat(),
        "floor": None if window.floor is None else window.floor.isoformat(),
        "looked_back": scanned.prepared.looked_back,
        "watermark": window.watermark.isoformat(),
        "grace_seconds": rule.grace_seconds,
        "rows_read": scanned.rows,
        "messages_read": scanned.messages,
        "rows_equal_by_checksum": scanned.checksums.skipped_rows,
        "keys_read_again": judged.confirmed.keys,
        "counts": judged.counts[""],
        "groups": {name: counts for name, counts in judged.counts.items() if name},
        "notes": [*scanned.prepared.notes, *filter(None, [scanned.checksums.note])],
    }
