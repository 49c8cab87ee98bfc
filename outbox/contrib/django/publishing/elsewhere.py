"""Refuses writes to a database other than the one whose transaction decides about the message.

A router may send a model's write to another alias than the one that `@transactional_message` chose without `using`. If
the function then failed, the row would stay and the message would be rolled back. Such a write is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, Final

from django.db import connections

from outbox.errors import TransactionUsageError

# A statement that changes rows, after comments and parentheses; WITH may contain one.
_WRITES: Final = re.compile(
    r"(?:\s|\(|--[^\n]*\n|/\*.*?\*/)*"
    r"(?:(?:INSERT|UPDATE|DELETE|MERGE|REPLACE|TRUNCATE|COPY)\b"
    r"|WITH\b.*\b(?:INSERT\s+INTO|UPDATE|DELETE\s+FROM|MERGE\s+INTO)\b)",
    re.IGNORECASE | re.DOTALL,
)


class _Watch:
    """Refuses a function's writes on aliases other than its own."""

    def __init__(self, alias: str, name: str) -> None:
        self.alias = alias
        self.name = name
        self.refused: TransactionUsageError | None = None

    def __call__(self, execute: Callable[..., Any], statement: Any, params: Any, many: bool, context: Any) -> Any:
        """See Django's `execute_wrapper`."""
        if _watching.get() is self and _WRITES.match(_text(statement)):
            self.refused = self._refusal(context["connection"].alias, _text(statement))
            raise self.refused
        return execute(statement, params, many, context)

    def _refusal(self, alias: str, statement: str) -> TransactionUsageError:
        return TransactionUsageError(
            f"{self.name} wrote to {alias!r} ({' '.join(statement.split())[:60]}…), but its message follows the "
            f"transaction on {self.alias!r}: had the function failed, the row would have stayed without its message. "
            "The write was not executed, and the transaction is rolled back. Say which database decides: "
            f"@transactional_message(…, using={alias!r}), or using={self.alias!r} if this write may commit "
            "separately."
        )


_watching: ContextVar[_Watch | None] = ContextVar("outbox_watching", default=None)


@contextmanager
def writes_stay_on(alias: str | None, name: str) -> Iterator[None]:
    """Refuse, within the block and this thread, writes on every other alias; None: allow them again.

    Raises TransactionUsageError before the write is executed. If the caller swallows it, it is raised again at the end
    of the block. Only writes through Django's cursors are seen. With one database it costs nothing.
    """
    watch = _Watch(alias, name) if alias is not None else None
    token = _watching.set(watch)
    try:
        with ExitStack() as stack:
            if watch is not None:
                for other in connections:
                    if other != alias:
                        stack.enter_context(connections[other].execute_wrapper(watch))
            yield
    finally:
        _watching.reset(token)
    if watch is not None and watch.refused is not None:
        raise watch.refused


def _text(statement: Any) -> str:
    if isinstance(statement, str):
        return statement
    return statement.as_string(None) if hasattr(statement, "as_string") else bytes(statement).decode(errors="replace")
