"""One run from end to end: look, look again, compare with the previous result, publish. The result is written last."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from . import errors
from .comparison import classify, contract, evidence, sides
from .comparison.classify import FindingClass
from .errors import RunIncomplete, UsageProblem
from .options import RunOptions
from .output import history, metrics, remedies, report
from .output.report_plot import Times
from .output.result import RuleRun, RunHead, apart, compose, shown
from .output.store import RESULT, Store
from .progress import Progress
from .rules import acknowledgements, subscriptions
from .rules import file as rules_file
from .rules.rule import Rule
from .sources.adbc import NAME
from .sources.base import SourceBoundary
from .stages import boundary, confirm, merge, prefilter, scan
from .stages.scan import readable_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SAMPLES_PER_CLASS: Final = 20


class Run:
    """A run over one rules file. `execute` returns the result that is now in force; `exit_code` follows from it."""

    def __init__(self, spark: SparkSession, options: RunOptions, progress: Progress) -> None:
        self._spark, self._options, self._progress = spark, options, progress
        self._started = datetime.now(UTC)
        self._rules = rules_file.load(options.rules)
        self._store = Store(options.output, self._rules.output_mode)
        self._name = f"{self._started:%Y%m%dT%H%M%S%fZ}-{uuid.uuid4().hex[:6]}"
        evidence.prepare(spark)
        self._sources = sides.Sources(spark, self._rules, f"{NAME} {self._name}")
        self._metrics: Path | None = None

    def execute(self) -> dict[str, Any]:
        """Run. Raises ReconcileError; then nothing was published and the previous result stays in force."""
        self._store.check_writable()
        if self._options.metrics is not None:
            self._metrics = metrics.target(self._options.metrics, self._options.rules)
        previous = self._previous()
        self._past = self._history()
        try:
            readings = self._open("taking snapshots")
            runs = [self._prepared(rule, previous, readings) for rule in self._rules.rules]
            for run in runs:
                self._scan(run)
            confirmed_at = self._confirm(runs, previous)
        finally:
            self._sources.close_all()
        return self._publish(runs, previous, readings, confirmed_at)

    def _previous(self) -> dict[str, Any] | None:
        result = self._store.result()
        if result is None:
            return None
        was_interval = result["mode"] == "interval"
        if was_interval != self._options.is_interval:
            held = "results of single intervals" if was_interval else "a chain of incremental results"
            raise UsageProblem(
                f"{self._options.output} holds {held}: give {'intervals' if not was_interval else 'incremental runs'} "
                f"an output folder of their own with --output."
            )
        if was_interval and result["interval"] != self._interval():
            return None
        return result

    def _history(self) -> history.Entries:
        """What earlier runs came to; the one whose result is in force may have been killed before it kept that."""
        try:
            in_force = self._store.result()
            if in_force is not None:
                history.make_up(self._store, in_force)
            return history.until(self._store, self._started.date())
        except OSError as error:
            raise UsageProblem(
                f"the history in {self._options.output!r} cannot be read or written: {error}."
            ) from error

    def _interval(self) -> list[str] | None:
        since, until = self._options.since, self._options.until
        return [since.isoformat(), until.isoformat()] if since is not None and until is not None else None

    def _open(self, text: str) -> list[SourceBoundary]:
        with self._progress.step(f"stage snapshot: {text}"), readable_errors("taking snapshots"):
            readings = self._sources.open_all()
        for reading in readings:
            for note in reading.notes:
                self._progress.say(f"  {reading.database}: {note}")
        return readings

    def _prepared(self, rule: Rule, previous: dict[str, Any] | None, readings: list[SourceBoundary]) -> RuleRun:
        with readable_errors(f"checking rule {rule.name!r}"):
            horizon = sides.known_topic(rule, self._sources)
            schema = self._rules.databases[self._rules.broker].schema
            rule, notes = subscriptions.resolved(rule, self._sources, schema)
            notes += sides.check(rule, self._sources)
            run = RuleRun(rule, boundary.window(rule, self._options, readings, previous))
            if horizon is not None:
                boundary.limit_by_retention(run, horizon)
        run.looked_back = boundary.looked_back(run, previous)
        run.notes += notes + acknowledgements.ended(self._rules.acknowledged, rule.name, self._started)
        run.notes += [
            f"group {group.name}: judged by the broker's offsets, which say whether and not when: never LATE"
            for group in rule.groups
            if not group.table
        ]
        return run

    def _scan(self, run: RuleRun) -> None:
        rule = run.rule
        limits, known = sides.ReadLimits(), None
        if rule.bucket_seconds is not None:
            with self._progress.step(f"stage checksum: rule {rule.name}"), readable_errors("comparing checksums"):
                outcome = prefilter.compare(rule, self._rules, self._sources, run.window)
            run.notes.append(outcome.note)
            run.skipped, limits, known = outcome.skipped_rows, outcome.limits, outcome.volume
        since = "the beginning" if run.window.since is None else run.window.since.isoformat()
        text = f"stage scan: rule {rule.name}, rows from {since} to {run.window.until.isoformat()}"
        with self._progress.step(text):
            name = f"suspects/{self._number(rule)}"
            if limits.is_nothing:
                run.scanned = scan.nothing(rule)
                self._write_empty(name, scan.SUSPECT_SCHEMA)
            else:
                run.scanned = scan.scan(self._spark, rule, self._sources, run.window, limits, self._spark_path(name))
            with readable_errors(f"counting the rows of rule {rule.name!r}"):
                seen = (run.skipped + run.scanned.rows > 0, run.skipped + run.scanned.messages > 0)
                sides.check_not_empty(rule, self._sources, run.window.floor, seen)
                rows, span = contract.rows(rule), run.scanned.span_seconds
                run.volume = report.volume(self._sources[rule.database], rows, run.window.since, span, known)
        self._progress.say(f"  {run.scanned.rows} rows, {run.scanned.messages} messages: {shown(run.scanned.counts)}")

    def _write_empty(self, name: str, schema: str) -> None:
        """Parquet without a row, which takes no job of Spark's."""
        self._store.write_table(f"runs/{self._name}/{name}/part-0.parquet", merge.empty_table(schema))

    def _confirm(self, runs: list[RuleRun], previous: dict[str, Any] | None) -> list[SourceBoundary]:
        earlier = self._earlier(previous)
        if earlier is None and not any(run.saw(*classify.FAULTS) for run in runs):
            self._progress.say("stage confirm: nothing to look at again")
            return []
        with self._progress.step("stage confirm: collecting suspects"), readable_errors("collecting suspects"):
            keys = [self._keys(run, earlier) for run in runs]
            for run, wanted in zip(runs, keys, strict=True):
                run.suspects = wanted.count()
        self._sources.close_all()
        if not any(run.suspects for run in runs):
            return []
        readings = self._open("again, for the suspects")
        for run, wanted in zip(runs, keys, strict=True):
            if run.suspects:
                with self._progress.step(f"stage confirm: rule {run.rule.name}, {run.suspects} keys"):
                    target = self._spark_path(f"confirmed/{self._number(run.rule)}")
                    confirm.confirm(self._spark, run.rule, self._sources, run.window, wanted, target)
        return readings

    def _keys(self, run: RuleRun, earlier: DataFrame | None) -> DataFrame:
        from pyspark.sql import functions as F

        at = F.col("at").alias("sought_at")
        suspects = self._suspects([run]).where(F.col("class") != "PENDING")
        wanted = suspects.select("key", F.lit(False).alias("carried"), at)
        if earlier is not None:
            left = earlier.where((F.col("rule") == run.rule.name) & merge.judgeable(F.lit(run.window.floor)))
            carried = left.select("key", F.lit(True).alias("carried"), at)
            wanted = wanted.unionByName(carried)
        return wanted.groupBy("key").agg(F.max("carried").alias("carried"), F.min("sought_at").alias("sought_at"))

    def _earlier(self, previous: dict[str, Any] | None) -> DataFrame | None:
        from pyspark.sql import functions as F

        if previous is None or not previous["open_subjects"]:
            return None
        names = [rule.name for rule in self._rules.rules]
        with readable_errors("reading the previous result"):
            return (
                self._spark.read.schema(merge.OPEN_SCHEMA)
                .parquet(self._store.spark_path(previous["open"]))
                .where(F.col("rule").isin(names))
            )

    def _publish(
        self,
        runs: list[RuleRun],
        previous: dict[str, Any] | None,
        readings: list[SourceBoundary],
        confirmed_at: list[SourceBoundary],
    ) -> dict[str, Any]:
        with self._progress.step("stage write: findings"), readable_errors("writing the findings"):
            findings, counted, still_open = self._write_findings(runs, self._earlier(previous))
            buckets = self._count(runs, findings, counted)
            self._check_interval(runs)
            result = compose(self._head(), runs, readings, confirmed_at, still_open)
            known, new = (sum(each.findings for each in counted if getattr(each, n)) for n in ("is_known", "is_new"))
            result |= apart(result["faults"], known=known, new=new)
            samples = [] if findings is None else report.samples(findings, SAMPLES_PER_CLASS)
        with self._progress.step("stage publish: report and result"):
            entries = history.of_result(self._store, result)
            trend = history.trend(self._past.and_then(entries), SAMPLES_PER_CLASS)
            volumes = {run.rule.name: run.volume for run in runs}
            text = report.render(result, samples, buckets, volumes, trend, self._rules.trace)
            try:
                self._store.protect(f"runs/{self._name}")
                self._store.write(f"runs/{self._name}/report.html", text)
                self._store.write(RESULT, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
            except OSError as error:
                raise UsageProblem(
                    f"the result cannot be written: {error}. The previous one stays in force."
                ) from error
            self._show(result, text, entries)
        self._store.remove_old_runs(self._name)
        return result

    def _show(self, result: dict[str, Any], report_text: str, entries: history.Entries) -> None:
        """What only shows the result in force: it must not be ahead of it, and may stay behind."""
        try:
            history.keep(self._store, entries)
            self._store.write("report.html", report_text)
            if self._metrics is not None:
                metrics.write(self._metrics, result, self._options.rules)
        except OSError as error:
            self._progress.say(f"  the result is published, but not everything that shows it: {error}")

    def _check_interval(self, runs: list[RuleRun]) -> None:
        """An interval is published when everything in it is judged, or nothing but delayed messages is left."""
        for run in runs:
            window = run.window
            pending = sum(counts["PENDING"] for counts in run.counts.values())
            judgeable_at = window.until + run.rule.longest_wait
            if window.is_exact and pending and window.watermark < judgeable_at:
                raise RunIncomplete(
                    f"rule {run.rule.name!r}: {pending} subjects of the interval cannot be judged yet, as they are "
                    f"within their limits. Run it again after {judgeable_at.isoformat()}."
                )

    def _write_findings(
        self, runs: list[RuleRun], earlier: DataFrame | None
    ) -> tuple[DataFrame | None, list[merge.FindingCounts], int]:
        """The written findings (None: there are none), counted; and how many subjects the next run looks at again."""
        target, still_open = self._spark_path("findings"), self._spark_path("open")
        if earlier is None and not any(run.suspects or run.saw(FindingClass.PENDING) for run in runs):
            self._write_empty("findings", merge.FINDINGS_SCHEMA)
            self._write_empty("open", merge.OPEN_SCHEMA)
            return None, [], 0
        if earlier is None:
            earlier = merge.nothing(self._spark)
        confirmed = self._confirmed(runs)
        waiting = self._suspects(runs).where("class = 'PENDING'")
        limits = {run.rule.name: merge.RuleLimits(run.window.until, run.window.floor) for run in runs}
        pending = merge.pending(waiting, confirmed, earlier)
        findings = merge.findings(confirmed, earlier, pending, limits)
        findings = acknowledgements.applied(self._spark, findings, self._acknowledged())
        findings = remedies.with_remedies(findings, self._rules.trace)
        # One file, so it is sorted in one task: to sort it in several Spark would compute it twice.
        ordered = merge.in_order(findings).repartition(1).sortWithinPartitions("rule", "class", "group", "key")
        count = scan.put(ordered, target)
        written = self._spark.read.schema(merge.FINDINGS_SCHEMA).parquet(target)
        counted = merge.counted(written, report.bucket_seconds([run.volume for run in runs]))
        scan.check_parts(target, count, sum(each.findings for each in counted))
        state = merge.state_of(written, pending).coalesce(1)
        return written, counted, scan.write(self._spark, state, still_open, merge.OPEN_SCHEMA)

    def _acknowledged(self) -> list[acknowledgements.Acknowledgement]:
        return acknowledgements.in_force(self._rules.acknowledged, self._started)

    def _confirmed(self, runs: list[RuleRun]) -> DataFrame:
        paths = [self._spark_path(f"confirmed/{self._number(run.rule)}") for run in runs if run.suspects]
        if not paths:
            return merge.empty(self._spark, confirm.SCHEMA)
        return self._spark.read.schema(confirm.SCHEMA).parquet(*paths)

    def _count(self, runs: list[RuleRun], findings: DataFrame | None, counted: list[merge.FindingCounts]) -> Times:
        """Counts of the result: the first look's, with its suspects counted as what the second look found.

        Returns the findings by class and time, for the report's timeline.
        """
        faults = {name.value for name in classify.FAULTS}
        dismissed = {} if findings is None else self._dismissed(runs, findings)
        for run in runs:
            assert run.scanned is not None
            for subject, seen in run.scanned.counts.items():
                new = dict.fromkeys((name.value for name in classify.CLASSES), 0)
                for each in counted:
                    if (each.rule, each.group) == (run.rule.name, subject):
                        new[each.name] += each.findings
                new["OK"] = seen["OK"] + dismissed.get((run.rule.name, subject, "OK"), 0) + run.skipped
                new["PENDING"] = seen["PENDING"] + dismissed.get((run.rule.name, subject, "PENDING"), 0)
                run.counts[subject] = new
        timed = [each for each in counted if each.bucket is not None and each.name in faults]
        return [(each.name, float(each.bucket or 0), each.findings) for each in timed]

    def _dismissed(self, runs: list[RuleRun], findings: DataFrame) -> dict[tuple[str, ...], int]:
        """Suspects that are no findings, by rule, group and what they are instead."""
        from pyspark.sql import functions as F

        if not any(run.suspects for run in runs):
            return {}
        suspects = self._suspects(runs).where("class <> 'PENDING'").select(*merge.SUBJECT)
        none = suspects.join(findings.select(*merge.SUBJECT), merge.SUBJECT, "left_anti")
        waiting = self._confirmed(runs).where("class = 'PENDING'").select(*merge.SUBJECT, F.lit("PENDING").alias("is"))
        counted = none.join(waiting, merge.SUBJECT, "left").groupBy("rule", "group", F.coalesce("is", F.lit("OK")))
        return {tuple(row)[:-1]: int(row["count"]) for row in counted.count().collect()}

    def _head(self) -> RunHead:
        mode = "interval" if self._options.is_interval else "full" if self._options.full else "incremental"
        return RunHead(
            title=self._rules.title,
            name=self._name,
            mode=mode,
            interval=self._interval(),
            started=self._started,
            batch=self._options.batch,
        )

    def _suspects(self, runs: list[RuleRun]) -> DataFrame:
        from pyspark.sql import functions as F

        read = self._spark.read.schema(scan.SUSPECT_SCHEMA)
        frames = [
            read.parquet(self._spark_path(f"suspects/{self._number(run.rule)}")).withColumn(
                "rule", F.lit(run.rule.name)
            )
            for run in runs
        ]
        return reduce(type(frames[0]).unionByName, frames)

    def _spark_path(self, name: str) -> str:
        return self._store.spark_path(f"runs/{self._name}/{name}")

    def _number(self, rule: Rule) -> int:
        return [each.name for each in self._rules.rules].index(rule.name)


def exit_code(result: dict[str, Any]) -> int:
    """0 for a clean result, 1 for one with findings."""
    return errors.FINDINGS if result["status"] == "findings" else errors.CLEAN


def run(spark: SparkSession, options: RunOptions, progress: Progress | None = None) -> dict[str, Any]:
    """Reconcile once. See Run."""
    return Run(spark, options, progress or Progress()).execute()
