"""The command `outbox-reconcile`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from . import session
from .common.errors import CLEAN, FINDINGS, INCOMPLETE, ReconcileError, RunIncomplete, UsageProblem
from .common.options import RunOptions, parse_moment, parse_span
from .common.progress import Progress
from .common.safe_text import for_people
from .common.store import Store
from .rules import file as rules_file
from .rules.rule import SourceKind

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DESCRIPTION = """Compare business tables, messages and effects with each other.

Exit codes: 0 no findings, 1 findings, 2 an operator must correct something first, 3 incomplete (run the command again).
With the exit codes 2 and 3 no result was published, so the previous result stays in force."""

# What a shell shows for a program that SIGPIPE has ended.
_CLOSED_PIPE: Final = 128 + signal.SIGPIPE
_SILENCE_SECONDS: Final = 5.0


def parser() -> argparse.ArgumentParser:
    """The argument parser of the command."""
    root = argparse.ArgumentParser(
        prog="outbox-reconcile", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    rules, output, limit, spark = (argparse.ArgumentParser(add_help=False) for _ in range(4))
    rules.add_argument(
        "--rules", type=Path, default=Path("reconcile.toml"), help="the rules file (default: %(default)s)"
    )
    output.add_argument(
        "--output",
        default="reconcile",
        help="folder of the results, or s3a://, gs://, hdfs:// URI (default: %(default)s)",
    )
    limit.add_argument("--limit", type=int, help="print at most this number of lines")
    where = spark.add_mutually_exclusive_group()
    where.add_argument(
        "--master", help="the Spark master (default: local[*], or under spark-submit the master of spark-submit)"
    )
    where.add_argument("--remote", metavar="URL", help="a Spark Connect server, as in sc://spark.example.com:15002")
    spark.add_argument(
        "--conf",
        action="append",
        default=[],
        type=_setting,
        metavar="KEY=VALUE",
        help="a Spark setting, for example spark.driver.memory=8g or spark.jars.packages=… (repeatable)",
    )
    spark.add_argument("--quiet", action="store_true", help="print no progress on standard error")
    commands = root.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", parents=[rules, output, spark], help="reconcile once")
    run.add_argument("--metrics", type=Path, help="write a Prometheus textfile: its path, or its folder")
    run.add_argument(
        "--from", dest="since", type=_parsed(parse_moment), help="judge rows from this time on (ISO 8601); needs --to"
    )
    run.add_argument("--to", dest="until", type=_parsed(parse_moment), help="judge rows before this time (ISO 8601)")
    run.add_argument("--full", action="store_true", help="judge all rows again, not only the rows since the last run")
    run.add_argument(
        "--look-back",
        nargs="?",
        const=0.0,
        type=_parsed(parse_span),
        metavar="DURATION",
        help="judge the rows of the last DURATION again, for example 7d (default: look_back of each rule)",
    )
    run.add_argument(
        "--every",
        type=_parsed(parse_span),
        metavar="DURATION",
        help="run again and again in one Spark session, each run so long after the last one, for example 1m",
    )
    run.add_argument("--json", action="store_true", help="print the result as JSON")
    archive = commands.add_parser(
        "archive",
        parents=[rules, spark],
        help="keep the broker's log as Parquet, in the archive of [broker], before retention removes it",
    )
    archive.add_argument(
        "--erase",
        action="store_true",
        help="only erase the messages that outbox_erase has erased in the broker. The environment variable "
        "OUTBOX_ERASURE_SECRET is the secret of the settings",
    )
    commands.add_parser("check", parents=[rules], help="validate the rules file, without Spark or a database")
    found = commands.add_parser(
        "findings", parents=[output, limit], help="print the findings of the result in force, one JSON object per line"
    )
    found.add_argument(
        "--cause", metavar="ID", help="print only the findings of this cause (result.json and the report)"
    )
    commands.add_parser(
        "plan", parents=[rules, output, limit], help="print the steps of a repair, one JSON object per line"
    )
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    given = parser().parse_args(arguments)
    try:
        if given.command == "check":
            rules = rules_file.load(given.rules)
            print(f"{given.rules} is valid. Rules: {len(rules.rules)}, databases: {len(rules.databases)}.")
            return 0
        if given.command == "findings":
            for line in _finding_lines(given):
                print(line)
            return 0
        if given.command == "plan":
            from .output import plan

            for line in plan.lines(given.output, rules_file.load(given.rules, is_connected=False), given.limit):
                print(line)
            return 0
        return _archive(given) if given.command == "archive" else _run(given)
    except BrokenPipeError:
        # The program that reads the output, such as `head`, has closed the pipe. Discard Python's output buffer,
        # because writing it at exit would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED_PIPE
    except ReconcileError as error:
        print(f"outbox-reconcile: {for_people(str(error))}", file=sys.stderr)
        return error.exit_code
    except Exception:
        # Python's own exit code for a traceback is 1. In this command the exit code 1 means "findings".
        print(for_people(traceback.format_exc()), file=sys.stderr)
        print("outbox-reconcile: an unexpected error (see above); the previous result stays in force.", file=sys.stderr)
        return INCOMPLETE
    except KeyboardInterrupt:
        print("outbox-reconcile: interrupted; the previous result stays in force.", file=sys.stderr)
        return INCOMPLETE


def _run(given: argparse.Namespace) -> int:
    _handle_signals()
    named = {each.name for each in fields(RunOptions)}
    options = RunOptions(**{name: value for name, value in vars(given).items() if name in named})
    if given.every is not None and (options.is_interval or options.full):
        raise UsageProblem("--every continues after the last result, so it accepts neither --from, --to nor --full.")
    progress = Progress(quiet=given.quiet)
    rules = rules_file.load(options.rules)
    # A run whose checksums are all equal reads no row, so it needs no Spark (`session.deferred`).
    may_need_none = all(rule.bucket_seconds for rule in rules.rules)
    may_need_none &= all(database.kind is SourceKind.POSTGRES for database in rules.databases.values())
    if may_need_none and given.remote is None and not session.is_submitted():
        spark = session.deferred(lambda: _start(given, progress))
    else:
        spark = _start(given, progress)
    if given.every is None:
        return _run_once(spark, options, progress, given.json)
    while True:
        try:
            code = _run_once(spark, options, progress, given.json)
        except RunIncomplete as error:
            if session.has_ended(spark):
                raise
            print(f"outbox-reconcile: {for_people(str(error))} The next run judges the same rows.", file=sys.stderr)
            code = INCOMPLETE
        try:
            progress.say(f"the next run begins in {given.every:g} s")
            time.sleep(given.every)
        except KeyboardInterrupt:
            return code


def _handle_signals(spark: SparkSession | None = None) -> None:
    """Let SIGTERM and Ctrl-C end the command by KeyboardInterrupt.

    Without this, SIGTERM would end the process at once, and its lock in an object store would stay. Spark has a handler
    of Ctrl-C, which waits for the end of the Spark job.
    """

    def interrupt(*_: object) -> NoReturn:
        # In a thread, because the connection of this thread to Java may wait for an answer.
        silencing = threading.Thread(target=session.silence, args=[spark])
        silencing.start()
        silencing.join(_SILENCE_SECONDS)
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, interrupt)


def _run_once(spark: SparkSession, options: RunOptions, progress: Progress, as_json: bool) -> int:
    from . import pipeline
    from .output import summary
    from .output.result import shown_totals

    result = pipeline.run(spark, options, progress)
    # The most urgent actions, the boundary, and in the last line the totals.
    said = [*summary.lines(result), f"{shown_totals(result)}. Report: {options.output}/report.html"]
    print(json.dumps(result, indent=2) if as_json else for_people("\n".join(said)), flush=True)
    return pipeline.exit_code(result)


def _start(given: argparse.Namespace, progress: Progress) -> SparkSession:
    progress.say("stage start: Spark")
    spark = session.start(given.master, dict(given.conf), given.remote)
    _handle_signals(spark)
    return spark


def _finding_lines(given: argparse.Namespace) -> Iterator[str]:
    store = Store(given.output)
    if given.cause is None:
        return store.finding_lines(given.limit)
    from .judging import causes

    known = [cause["id"] for cause in store.result_in_force().get("causes", ())]
    if given.cause not in known:
        raise UsageProblem(
            f"the result in {given.output} has no cause {given.cause!r}: a later run may have replaced the result of "
            f"your report. The causes of the result in force are: {', '.join(known) or 'none'}."
        )
    return store.finding_lines(given.limit, lambda finding: given.cause in causes.ids_of(finding))


def _archive(given: argparse.Namespace) -> int:
    """Return 0 if the archive is complete.

    Return 1 if retention removed messages before a pass archived them.
    """
    rules = rules_file.load(given.rules)
    progress = Progress(quiet=given.quiet)
    spark = _start(given, progress)
    from . import archive

    work = archive.Archive(spark, rules, progress)
    if given.erase:
        print(f"{work.erase(os.environ.get('OUTBOX_ERASURE_SECRET'))} messages erased")
        return CLEAN
    made, gaps = work.run()
    print("nothing new" if made is None else f"{made.folder}: {made.count} messages settled before {made.until}")
    for gap in gaps:
        text = f"were removed before {gap.until} and are not in the archive. Run outbox-reconcile archive more often."
        if gap.messages < 0:
            text = "are archived, but no longer in the log, as after a restore. Run manage.py outbox_audit compare."
        print(f"outbox-reconcile: {abs(gap.messages)} messages of topic {gap.topic} {text}", file=sys.stderr)
    return FINDINGS if any(gap.messages > 0 for gap in gaps) else CLEAN


def _setting(value: str) -> tuple[str, str]:
    name, separator, setting = value.partition("=")
    if not separator or not name.startswith("spark."):
        raise argparse.ArgumentTypeError(f"{value!r} is not a Spark setting: write spark.driver.memory=8g.")
    return name, setting


def _parsed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """The type of an argument that `parse` reads; its UsageProblem becomes an error of the argument."""

    def read(value: str) -> Any:
        try:
            return parse(value)
        except UsageProblem as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read
