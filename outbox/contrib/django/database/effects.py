"""Refuses writes and publish calls of a handler with effects="outside" outside of its steps and `finish`.

Such a handler has no transaction that its writes could belong to: a write would stay although the attempt fails, and
the next attempt would repeat it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from django.db import connections

from outbox.contrib.django.database.transactions import statement_text
from outbox.errors import TransactionUsageError


@dataclass(slots=True)
class RefusedWrites:
    """The handler whose writes are refused. `first`: the error of the first refused write, also if it was caught."""

    name: str
    first: TransactionUsageError | None = None

    def check(self) -> None:
        """Raise the first error again: a handler that caught it would finish its message without the refused write."""
        if self.first is not None:
            raise self.first


# Set while the writes of a handler are refused. Steps run in the context of the handler, too.
refused_writes: ContextVar[RefusedWrites | None] = ContextVar("outbox_refused_effects", default=None)

_SPACE: Final = r"[\s(]*"
_READS: Final = re.compile(
    rf"{_SPACE}(?:(?:select|with|values|table|show|explain|set|reset|begin|start|commit|end|rollback|savepoint|release"
    r"|declare|fetch|move|close|pragma|listen|unlisten|notify|analyze|lock|unlock|prepare|execute|deallocate|describe"
    r"|desc|use)\b|$)",
    re.IGNORECASE | re.DOTALL,
)
_WRITES: Final = re.compile(
    r"\b(insert\s+into|delete\s+from|merge\s+into|update\s+(?:only\s+)?(?:[\w.]+|\"[^\"]*\"|\.)+\s[^;]*?\bset"
    r"|into\s+(?:temp|temporary|unlogged|table))\b",
    re.IGNORECASE | re.DOTALL,
)
_CONSTANTS: Final = re.compile(r"('(?:[^']|'')*')|--[^\n]*|/\*.*?\*/", re.DOTALL)
_FIRST_WORD: Final = re.compile(rf"{_SPACE}(\w+)", re.DOTALL)


def refuse(what: str) -> None:
    """Raise TransactionUsageError if the caller is a handler that may not write now. `what` names the effect."""
    if (refusals := refused_writes.get()) is not None:
        error = TransactionUsageError(
            f"{refusals.name}: {what} was not done, because the handler has effects='outside' and no open "
            "transaction. A write here would stay although the attempt fails. Move it into `with delivery.finish():`, "
            "which commits it together with the mark that the message is done. If the write must come earlier, put it "
            "into a `delivery.step(…)`, which may be repeated after a crash."
        )
        refusals.first = refusals.first or error
        raise error


def _guard(execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
    """An execute wrapper of Django that refuses the statements of a handler that may not write now."""
    connection = context["connection"]
    if refused_writes.get() is not None and (word := written(statement_text(sql, connection))):
        refuse(f"{word} on {connection.alias!r}")
    return execute(sql, params, many, context)


def written(text: str) -> str:
    """Return the first word of a statement that may change rows, or ''.

    Each statement may do so unless it begins with a word of `_READS` and contains none of `_WRITES`. So CALL and DO
    count as writes, because they may write.
    """
    text = _CONSTANTS.sub(lambda found: "''" if found[1] else " ", text)
    for part in text.split(";"):
        if found := _WRITES.search(part):
            return found[1].split()[0].upper()
        if not _READS.match(part):
            first = _FIRST_WORD.match(part)
            return first[1].upper() if first else part.strip()
    return ""


@contextmanager
def refused(refusals: RefusedWrites) -> Iterator[None]:
    """Inside the block, refuse writes on all aliases and publish calls of this thread."""
    guarded = connections.all()
    for connection in guarded:
        connection.execute_wrappers.append(_guard)
    token = refused_writes.set(refusals)
    try:
        yield
    finally:
        refused_writes.reset(token)
        for connection in guarded:
            connection.execute_wrappers.remove(_guard)


@contextmanager
def allowed() -> Iterator[None]:
    """Inside the block, allow writes and publish calls again."""
    token = refused_writes.set(None)
    try:
        yield
    finally:
        refused_writes.reset(token)
