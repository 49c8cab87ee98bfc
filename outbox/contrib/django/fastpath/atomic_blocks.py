"""Notifies the watch of a connection when an outermost atomic block begins.

Django has no signal for the beginning of a block. `WatchedBlocks` replaces Django's own list of open blocks, so a block
costs no extra time. With the fast paths off, Django keeps its own list, and `BlockMark` detects a new block at each
statement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import Atomic


class WatchedBlocks(list[Atomic]):
    """Django's list of a connection's open atomic blocks; it calls `begin` when an outermost block begins."""

    def __init__(self, begin: Callable[[], None]) -> None:
        super().__init__()
        self._begin = begin

    def append(self, block: Atomic) -> None:
        if all(is_test_case(outer) for outer in self):
            self._begin()
        super().append(block)


class BlockMark:
    """A mark in the list of on_commit callbacks. Django empties this list when the outermost block ends."""

    def __init__(self) -> None:
        self._savepoint: str | None = None

    def __call__(self) -> None:
        """Do nothing when Django calls the mark as a callback."""

    def is_new(self, connection: BaseDatabaseWrapper) -> bool:
        """Whether an outermost block is open that was not open at the last call. False if no block is open."""
        outside = sum(map(is_test_case, connection.atomic_blocks))
        if len(connection.atomic_blocks) == outside:
            return False
        # Inside a TestCase, Django does not empty the list of callbacks, so the savepoints of the blocks are also
        # compared.
        savepoint = connection.savepoint_ids[outside - 1] if outside else None
        callbacks: list[Any] = connection.run_on_commit
        is_marked = any(callback is self for _, callback, *_ in callbacks)
        if not is_marked:
            # The empty set of savepoints keeps the mark in the list when an inner block rolls back.
            callbacks.append((set(), self, True))
        is_same = is_marked and savepoint == self._savepoint
        self._savepoint = savepoint
        return not is_same


def is_test_case(block: Any) -> bool:
    """Whether this is the block that a TestCase wraps around a test."""
    return bool(block._from_testcase)
