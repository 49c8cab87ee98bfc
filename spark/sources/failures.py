"""What PostgreSQL's errors mean to the one who runs a reconciliation: something to correct, or to run again."""

from __future__ import annotations

from typing import Any, Final

from ..errors import ReconcileError, RunIncomplete, UsageProblem
from . import adbc

_USAGE_STATES: Final = {
    "42P01": "the table is not there",
    "3F000": "the schema is not there",
    "42703": "a column is not there",
    "42501": "the reader may not read it, or not all its rows (GRANT SELECT; BYPASSRLS against row-level security)",
    "42601": "an expression of the rule is not valid SQL",
    "42883": "an expression of the rule compares types that cannot be compared",
    "42804": "an expression of the rule has the wrong type",
    "42846": "a column cannot be cast to the type that is compared",
    "22P02": "an expression of the rule has a constant of the wrong type",
}
# Data exception, syntax error or access rule violation, feature not supported.
_USAGE_CLASSES: Final = ("22", "42", "0A")
ACCESS_STATES: Final = ("28P01", "28000", "3D000")


def translated(database: str, error: Any, about: str) -> ReconcileError:
    """A driver's error while reading `about` as one of ours."""
    state = error.sqlstate or ""
    detail = f"{about} in database {database!r}: {adbc.one_line(error)}"
    if state in _USAGE_STATES or state[:2] in _USAGE_CLASSES:
        reason = _USAGE_STATES.get(state, "the database does not accept an expression of the rule")
        return UsageProblem(f"{reason}: {detail}. Correct the rules file or the connection.")
    return RunIncomplete(f"reading failed, {detail}. Run it again; the previous result stays in force.")
