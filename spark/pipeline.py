"""One run of a reconciliation, from the rules to the report. The stages run in this order, each once:

    open       snapshots of all databases                       sources/databases.py
    prepare    per rule: its window, its tables checked         stages/prepare.py    -> PreparedRule
    compare    per rule: buckets of time with equal checksums   stages/checksums.py  -> ComparedChecksums
    scan       per rule: classify all keys, write the suspects  stages/scan.py       -> ScannedRule
    confirm    per rule: read the suspects again by key         stages/confirm.py    -> ConfirmedRule
    collect    all rules: new, still open, recovered            stages/findings.py   -> Findings
    publish    report, result.json, then metrics                output/result.py

Each stage gets the return values of the earlier stages, and calls no earlier stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from .common import lock
from .common.errors import CLEAN, FINDINGS, UsageProblem, readable_errors
from .common.options import RunOptions
from .common.progress import Progress
from .output import metrics, report
from .output.result import SAMPLES_PER_CAUSE, compose, publish, shown
from .rules.rule import FAULTS
from .session import settings_of_a_run
from .sources.adbc import NAME
from .sources.base import SourceBoundary, released
from .sources.databases import Sources
from .stages import checksums, confirm, findings
from .stages.confirm import OPEN_SCHEMA, ConfirmedRule
from .stages.job import Job
from .stages.prepare import PreparedRule, prepare
from .stages.scan import ScannedRule, scan


def run(spark: SparkSession, options: RunOptions, progress: Progress | None = None) -> dict[str, Any]:
    """Reconcile once, and return the result that is now in force. `exit_code` computes the exit code from this result.

    `spark` may be any session, for example that of a notebook: the run sets what it needs, and restores it at the end.
    Do not use the session in another thread meanwhile.

    If the run fails, it raises ReconcileError and publishes nothing; the previous result stays in force. If another
    process writes into the output folder, the run raises RunIncomplete before any other work.
    """
    job = Job.of(options)
    job.store.check_writable()
    progress = progress or Progress()
    if note := job.store.note_of_readers():
        progress.say(note)
    with lock.hold(job.store), settings_of_a_run(spark):
        return _run(spark, job, progress)


def _run(spark: SparkSession, job: Job, progress: Progress) -> dict[str, Any]:
    options = job.options
    sources = Sources(spark, job.rules, f"{NAME} {job.name}")
    metrics_file = None if options.metrics is None else metrics.target(options.metrics, options.rules)
    previous = _previous_result(job)
    with released(sources.all):
        snapshots = _open(sources, "taking snapshots", progress)
        prepared = []
        for rule in job.rules.rules:
            with readable_errors(f"checking rule {rule.name!r}"):
                prepared.append(prepare(rule, job, snapshots, previous, sources))
        scanned = [_scan(spark, each, job, sources, progress) for each in prepared]
        still_open = _still_open(spark, job, previous)
        confirmed, confirmed_by = _confirm(spark, scanned, still_open, job, sources, progress)
    progress.say("stage write: findings")
    with readable_errors("writing the findings"):
        found = findings.collect(spark, confirmed, still_open, job)
        samples = [] if found.written is None else report.samples(found.written, SAMPLES_PER_CAUSE)
        result = compose(job, found, samples, snapshots, confirmed_by, previous)
    progress.say("stage publish: report and result")
    not_shown = publish(job, result, samples, metrics_file)
    if not_shown:
        progress.say(f"  {not_shown}")
    job.store.remove_old_runs(job.name)
    return result


def exit_code(result: dict[str, Any]) -> int:
    """Return 0 for a clean result, 1 for a result with more findings than `fail_above` tolerates."""
    return FINDINGS if result["status"] == "findings" and not result["is_tolerated"] else CLEAN


def _previous_result(job: Job) -> dict[str, Any] | None:
    """The result in force; None if there is no result, or if the result is about another interval."""
    result = job.store.result()
    if result is None:
        return None
    was_interval = result["mode"] == "interval"
    if was_interval != job.options.is_interval:
        held = "results of single intervals" if was_interval else "a chain of incremental results"
        raise UsageProblem(
            f"the output folder {job.options.output} contains {held}: give another output folder with --output for "
            f"{'intervals' if not was_interval else 'incremental runs'}."
        )
    return None if was_interval and result["interval"] != job.interval else result


def _open(sources: Sources, text: str, progress: Progress) -> list[SourceBoundary]:
    progress.say(f"stage snapshot: {text}")
    with readable_errors("taking snapshots"):
        snapshots = sources.open_all()
    for each in snapshots:
        for note in each.notes:
            progress.say(f"  {each.database}: {note}")
    return snapshots


def _scan(spark: SparkSession, prepared: PreparedRule, job: Job, sources: Sources, progress: Progress) -> ScannedRule:
    """Compare the checksums of a rule, and scan the rows in the buckets whose checksums differ."""
    rule, window = prepared.rule, prepared.window
    compared = checksums.ComparedChecksums()
    if rule.bucket_seconds:
        progress.say(f"stage checksum: rule {rule.name}")
        with readable_errors("comparing checksums"):
            compared = checksums.compare(prepared, job.rules, sources)
    since = "the beginning" if window.since is None else window.since.isoformat()
    progress.say(f"stage scan: rule {rule.name}, rows from {since} to {window.until.isoformat()}")
    scanned = scan(spark, prepared, compared, job, sources)
    progress.say(f"  {scanned.rows} rows, {scanned.messages} messages: {shown(scanned.counts)}")
    return scanned


def _still_open(spark: SparkSession, job: Job, previous: dict[str, Any] | None) -> DataFrame | None:
    """The open subjects of the previous result, for the rules of this run (OPEN_SCHEMA); None if there are none."""
    if previous is None or not previous["open_subjects"]:
        return None
    with readable_errors("reading the previous result"):
        left = spark.read.schema(OPEN_SCHEMA).parquet(job.store.spark_path(previous["open"]))
        return left.where(F.col("rule").isin([rule.name for rule in job.rules.rules]))


def _confirm(
    spark: SparkSession,
    scanned: Sequence[ScannedRule],
    still_open: DataFrame | None,
    job: Job,
    sources: Sources,
    progress: Progress,
) -> tuple[list[ConfirmedRule], list[SourceBoundary]]:
    """The second look at all rules, under new snapshots. If no rule has a suspect, the function takes no snapshot."""
    if still_open is None and not any(each.saw(*FAULTS) for each in scanned):
        progress.say("stage confirm: nothing to look at again")
        return [ConfirmedRule(each) for each in scanned], []
    progress.say("stage confirm: collecting suspects")
    with readable_errors("collecting suspects"):
        suspects = confirm.collect(spark, scanned, still_open)
    sources.close_all()
    confirmed_by = _open(sources, "again, for the suspects", progress) if any(each.count for each in suspects) else []
    confirmed = []
    for each in suspects:
        if not each.count:
            confirmed.append(ConfirmedRule(each.scanned))
            continue
        progress.say(f"stage confirm: rule {each.scanned.prepared.rule.name}, {each.count} keys")
        confirmed.append(confirm.confirm(each, job, sources))
    return confirmed, confirmed_by
