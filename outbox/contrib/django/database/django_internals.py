"""The names of Django that its documentation does not describe. All other modules use them by this one.

They were read in Django 5.2.19 and asgiref 3.13. tests/django/test_django_internals.py has a test for each, which fails
if a new version changes it.
"""

from __future__ import annotations

import asyncio
import inspect
import operator
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, Final, SupportsIndex, cast

from django.conf import settings
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import Atomic

from outbox.errors import TransactionUsageError

# The function in which Django opens a connection and sends the signal connection_created.
CONNECT: Final[CodeType] = inspect.unwrap(BaseDatabaseWrapper.connect).__code__
# The function that ends an atomic block. Its first step takes the newest block out of the connection's list.
_EXIT: Final[CodeType] = Atomic.__exit__.__code__
# The block in which application code watches the statements of a connection.
_WRAPPING: Final[CodeType] = inspect.unwrap(BaseDatabaseWrapper.execute_wrapper).__code__


class WatchedBlocks(list[Atomic]):
    """Django's list of a connection's open atomic blocks; it calls `begin` when an outermost block begins.

    Django has no signal for the beginning of a block. The list replaces the attribute `atomic_blocks`, so a block costs
    no extra time. Django keeps the error of an earlier block as the cause of a rollback, but it is not the cause of
    anything in a new block. So the list removes it.
    """

    def __init__(self, connection: BaseDatabaseWrapper, begin: Callable[[], None]) -> None:
        super().__init__(connection.atomic_blocks)
        self._connection: Any = connection
        self._begin = begin

    def append(self, block: Atomic) -> None:
        if all(map(is_test_case, self)):
            self._begin()
            if not self._connection.needs_rollback:
                self._connection.rollback_exc = None
        super().append(block)

    def pop(self, index: SupportsIndex = -1) -> Atomic:
        """Take a block out of the list, unless the block that ends now is not in it.

        A generator that was left inside a block ends this block when Python collects it, perhaps during a later block,
        and in any thread. Django would then end the later block. Raises TransactionUsageError, so that it does not.
        """
        caller = sys._getframe(1)
        if caller.f_code is _EXIT:
            ended = caller.f_locals["self"]
            if not any(block is ended for block in self):
                raise TransactionUsageError(
                    f"an atomic() block on {self._connection.alias!r} was left open, and ends only now, when another "
                    "block may be open. The other block continues. Enter a block with `with`, and close a generator "
                    "that is inside it."
                )
        return super().pop(index)


class WatchedWrappers(list[Any]):
    """Django's list of a connection's execute wrappers. `entered`: those whose block `execute_wrapper` is open.

    Django ends such a block by removing the newest wrapper. If a generator was left inside a block, Python ends the
    block when it collects the generator. Then this list removes the wrapper of this block, or none.
    """

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        super().__init__(connection.execute_wrappers)
        self.entered: Final[list[Any]] = []

    def append(self, wrapper: Any) -> None:
        super().append(wrapper)
        if sys._getframe(1).f_code is _WRAPPING:
            self.entered.append(wrapper)

    def pop(self, index: SupportsIndex = -1) -> Any:
        caller = sys._getframe(1)
        if caller.f_code is not _WRAPPING:
            return super().pop(index)
        wrapper = caller.f_locals["wrapper"]
        self.leave(wrapper)
        return wrapper

    def leave(self, wrapper: Any) -> None:
        """Remove a wrapper, if it is still there."""
        for places in (self.entered, self):
            for place in reversed(range(len(places))):
                if places[place] is wrapper:
                    del places[place]
                    break


# Whether an atomic block is the one that a TestCase wraps around a test.
is_test_case: Final = cast(Callable[[Atomic], bool], operator.attrgetter("_from_testcase"))


# The values of the settings that were read since a setting changed: Django drops all of them when a test overrides one.
settings_read: Final = cast(dict[str, object], object.__getattribute__(settings, "__dict__"))

# Like asyncio.get_running_loop, but returns None where that raises an error.
running_loop: Final = asyncio._get_running_loop

# The attributes of this object are the connections of the present thread. Under the name "cvar" asgiref keeps those of
# coroutines.
connections_of_thread: Final = cast(Any, connections)._connections._storage


def rollback_cause(connection: BaseDatabaseWrapper) -> Exception | None:
    """Return the error that has marked the connection's block for rollback, as far as Django knows it."""
    cause: Exception | None = connection.rollback_exc  # type: ignore[attr-defined]
    return cause


def set_rollback_cause(connection: BaseDatabaseWrapper, cause: Exception | None) -> None:
    """Set the error that Django names as the cause of its next TransactionManagementError."""
    connection.rollback_exc = cause  # type: ignore[attr-defined]


def running_tests() -> bool:
    """Whether a test runner of Django (or pytest-django) has set up this process."""
    # Do not detect a test run by the mailbox `mail.outbox`: django.core.mail.backends.locmem creates it, too.
    utils = sys.modules.get("django.test.utils")
    return hasattr(getattr(utils, "_TestState", None), "saved_data")
