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
    """The rules file has errors. Each error names its line, its key and the remedy."""

    def __init__(self, path: str, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(f"{path}:{problem}" for problem in problems))


class RunIncomplete(ReconcileError):
    """The run could not read all its data, or could not judge all its subjects. The same run may succeed later."""


@contextmanager
def readable_errors(what: str) -> Iterator[None]:
    """Turn Spark's errors into RunIncomplete. The error text has the reason in one line, without the JVM's stack."""
    try:
        yield
    except ReconcileError:
        raise
    except Exception as error:
        # Py4JJavaError, grpc's errors and PySparkException have no common public base.
        if not isinstance(error, OSError) and type(error).__module__.split(".")[0] not in ("py4j", "grpc", "pyspark"):
            raise
        raise _incomplete(what, error) from error


def _incomplete(what: str, error: Exception) -> RunIncomplete:
    text = str(error)
    if FAILURE in text:
        reason = text.split(FAILURE, 1)[1].splitlines()[0].split(" SQLSTATE")[0].strip()
        if "snapshot" in reason:
            reason = f"the run lost its snapshot ({reason}), because the connection that holds the snapshot was closed"
    else:
        reason = causes(text)
    remedy = "Run it again."
    if any(sign in text for sign in _DAMAGED):
        remedy = "Another run would fail too: correct the damaged file, or export the file again."
    return RunIncomplete(
        f"{what} failed: {reason}. Nothing was published; the previous result stays in force. {remedy}"
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
