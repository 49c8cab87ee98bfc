"""Removes a person's data from the errors of schedules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement

# The error is about a declaration, so it is erased only if it contains one of the texts. The type of the error stays.
_ERASE: Final = Statement("""
UPDATE {schema}.schedule
SET error = coalesce(substring(error FROM '^[A-Za-z_][A-Za-z0-9_]*:') || ' ', '') || '(erased)'
WHERE right(error, 8) <> '(erased)' AND error LIKE ANY(%(patterns)s::text[])
""")


def erase_errors(run: Executor, values: Mapping[str, Any]) -> int:
    """Erase the errors that contain one of the texts. Return their number."""
    return run.count(_ERASE, values)
