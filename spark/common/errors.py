"""Errors that end a reconciliation, and their exit codes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Final

CLEAN: Final = 0
FINDINGS: Final = 1
USAGE: Final = 2
INCOMPLETE: Final = 3
FAILURE: Final = "outbox-reconcile read failed:"
"""An executor's error about a source starts with this text. By this text, the driver finds the executor's error inside
of Spark's error."""
_STACK: Final = re.compile(r"\s+(at |\.\.\. \d+ more)|Driver stacktrace|JVM stacktrace")
# A task's Python is another interpreter, or the executors lack a package: no run succeeds before this is corrected.
_OTHER_PYTHON: Final = re.compile(r"No module named '[\w.]+'|PYTHON_VERSION_MISMATCH")
# Spark's error texts for a damaged file. Another attempt to read the file would fail too.
_DAMAGED: Final = ("FAILED_READ_FILE", "is not a Parquet file", "MALFORMED_")


class ReconcileError(Exception):
    """The run failed and wrote no result. The previous result stays in force."""

    exit_code: ClassVar[int] = INCOMPLETE


class UsageProblem(ReconcileError):
    """An operator must correct something before a run can succeed: rules, settings, Java, permissions or names."""

    exit_code = USAGE


class TableMissing(UsageProblem):
    """The folder of an export has no file of the table."""


class RulesInvalid(UsageProblem):
    """The rules file has errors. Each error names its key, as in rule['paid'].grace, and the remedy."""

    def __init__(self, path: str, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(f"{path}: {problem}" for problem in problems))


class RunIncomplete(ReconcileError):
    """The run could not read all its data, or could not judge all its subjects. The same run may succeed later."""


@contextmanager
def readable_errors(what: str) -> Iterator[None]:
    """Turn Spark's errors into RunIncomplete, or into UsageProblem if the executors lack a package. The error text has
    the reason in one line, without the JVM's stack."""
    try:
        yield
    except ReconcileError:
        raise
    except Exception as error:
        # Py4JJavaError, grpc's errors and PySparkException have no common public base.
        if not isinstance(error, OSError) and type(error).__module__.split(".")[0] not in ("py4j", "grpc", "pyspark"):
            raise
        raise _readable(what, error) from error


def _readable(what: str, error: Exception) -> ReconcileError:
    text = str(error)
    if FAILURE not in text and (missing := _OTHER_PYTHON.search(text)):
        return UsageProblem(
            f"{what} failed: the executors' Python is not that of this process, or lacks a package ({missing[0]}). Set "
            f"PYSPARK_PYTHON to an interpreter that has pyspark, pyarrow, adbc_driver_postgresql and this package, or "
            f"install them on the executors; {__name__.split('.')[0]}.session.ship(spark) sends this package alone."
        )
    if FAILURE in text:
        reason = text.split(FAILURE, 1)[1].splitlines()[0].split(" SQLSTATE")[0].strip()
        if "snapshot" in reason:
            reason = f"the run lost its snapshot ({reason}), because the connection that holds the snapshot was closed"
    else:
        reason = _java_end(error) or causes(text)
    remedy = "Run it again."
    if any(sign in text for sign in _DAMAGED):
        remedy = "Another run would fail too: correct the damaged file, or export the file again."
    return RunIncomplete(
        f"{what} failed: {reason}. Nothing was published; the previous result stays in force. {remedy}"
    )


def _java_end(error: Exception) -> str:
    """The reason if Spark's Java process does not answer, else ''. Py4J only says that a connection was refused."""
    if not isinstance(error, ConnectionError) and type(error).__name__ != "Py4JNetworkError":
        return ""
    return (
        "Spark's Java process has ended: the cause is in its last lines on standard error, or in a file "
        "hs_err_pid*.log. If there is none, most often the memory was too small (spark.driver.memory, and the memory "
        "of the machine)"
    )


def causes(text: str) -> str:
    """The text of a JVM error and of all its causes in one line, without the stacks."""
    lines: list[str] = []
    for line in text.splitlines():
        cause = line.strip().removeprefix("Caused by:").strip()
        if _STACK.match(line) or not cause or any(cause in earlier for earlier in lines):
            continue
        lines.append(cause)
    return "; ".join(lines).rstrip(". ")
