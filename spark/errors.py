"""Why a reconciliation could not be finished, and the exit code that says so."""

from __future__ import annotations

from typing import ClassVar, Final

CLEAN: Final = 0
FINDINGS: Final = 1
USAGE: Final = 2
INCOMPLETE: Final = 3


class ReconcileError(Exception):
    """No result was written; the previous one stays in force."""

    exit_code: ClassVar[int] = INCOMPLETE


class UsageProblem(ReconcileError):
    """Something must be corrected before any run can succeed: rules, settings, Java, permissions, names."""

    exit_code = USAGE


class TableMissing(UsageProblem):
    """An export has no such table."""


class RulesInvalid(UsageProblem):
    """The rules file has errors; each names its line, the key and the remedy."""

    def __init__(self, path: str, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(f"{path}:{problem}" for problem in problems))


class RunIncomplete(ReconcileError):
    """The run could not read or judge everything it had to; running it again may succeed."""
