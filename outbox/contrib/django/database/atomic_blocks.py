"""Notifies the watch of a connection when an outermost atomic block begins.

Django has no signal for the beginning of a block. `WatchedBlocks` replaces Django's own list of open blocks, so a block
costs no extra time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def is_test_case(block: Any) -> bool:
    """Whether this is the block that a TestCase wraps around a test."""
    return bool(block._from_testcase)
