"""Repeats a handler's transaction at once if another transaction stopped it.

PostgreSQL ends one of two transactions that conflict (a serialisation failure, a deadlock), and allows a repetition.
The handler is not at fault and nothing has happened, so this uses neither an attempt nor a delay of the retry queue.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Final, TypeVar

from outbox.utils import fence

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# serialization_failure, deadlock_detected; SQLITE_BUSY and SQLITE_LOCKED.
_STATES: Final = frozenset({"40001", "40P01"})
_SQLITE_CODES: Final = frozenset({5, 6})

MAX_TRIES: Final = 10
_LONGEST_PAUSE_SECONDS: Final = 0.1


def repeated(attempt: Callable[[], Result], name: str) -> Result:
    """Return the result of `attempt`, tried up to ten times while other transactions stop it. Raises its error."""
    for tries in range(1, MAX_TRIES):
        try:
            return attempt()
        except Exception as error:
            if not was_in_the_way(error) or fence.is_lost():
                raise
            logger.info("%s conflicted with another transaction and starts again (%d): %s", name, tries, error)
        # The first repetition starts at once; later ones wait for different times, so that they do not collide again.
        time.sleep(random.uniform(0, min(_LONGEST_PAUSE_SECONDS, 0.001 * (2**tries - 2))))
    return attempt()


def was_in_the_way(error: BaseException | None) -> bool:
    """Whether the error, or one of its causes, says that another transaction stopped the statement."""
    # An error may be raised `from` itself.
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if getattr(error, "sqlstate", None) in _STATES:
            return True
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _SQLITE_CODES:
            return True
        error = error.__cause__
    return False
