"""Tells the watch of a connection where each outermost atomic block begins.

Django has no signal for it. This list takes the place of Django's own list of open blocks, so a block costs nothing
more. With the fast paths off, Django keeps its list and `BlockMark` finds out at each statement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import Atomic


class WatchedBlocks(list[Atomic]):
    """Django's list of a connection's open atomic blocks; it calls `begin` with each outermost block."""

    def __init__(self, begin: Callable[[], None]) -> None:
        super().__init__()
        self._begin = begin

    def append(self, block: Atomic) -> None:
        if all(is_test_case(outer) for outer in self):
            self._begin()
        super().append(block)


class BlockMark:
    """A mark among the on_commit callbacks of a block: Django drops them when the outermost block ends."""

    def __init__(self) -> None:
        self._savepoint: str | None = None

    def __call__(self) -> None:
        """Do nothing, as a callback."""

    def is_new(self, connection: BaseDatabaseWrapper) -> bool:
        """Whether another outermost block is open than at the last call; False without a block."""
        outside = sum(map(is_test_case, connection.atomic_blocks))
        if len(connection.atomic_blocks) == outside:
            return False
        # Inside a TestCase no callback is dropped, but each block has a savepoint of its own.
        savepoint = connection.savepoint_ids[outside - 1] if outside else None
        callbacks: list[Any] = connection.run_on_commit
        is_marked = any(callback is self for _, callback, *_ in callbacks)
        if not is_marked:
            # Without savepoints, so that the rollback of an inner block leaves it.
            callbacks.append((set(), self, True))
        is_same = is_marked and savepoint == self._savepoint
        self._savepoint = savepoint
        return not is_same


def is_test_case(block: Any) -> bool:
    """Whether this is the block that a TestCase wraps around a test."""
    return bool(block._from_testcase)
