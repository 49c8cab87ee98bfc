"""Transactions of handlers that ended because another one was in their way: repeated at once, where they are.

PostgreSQL ends one of two transactions that cannot both go on (a serialisation failure, a deadlock), and says that it
may be repeated. The handler has done nothing wrong and nothing has happened: neither an attempt nor the delay of the
retry queue is due.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Final, TypeVar

from outbox import fence

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# serialization_failure, deadlock_detected; SQLITE_BUSY and SQLITE_LOCKED.
_STATES: Final = frozenset({"40001", "40P01"})
_SQLITE_CODES: Final = frozenset({5, 6})

MAX_TRIES: Final = 10
_LONGEST_PAUSE_SECONDS: Final = 0.1


def repeated(attempt: Callable[[], Result], name: str) -> Result:
    """What `attempt` returns, tried up to ten times while other transactions are in its way. Raises what it raises."""
    for tries in range(1, MAX_TRIES):
        try:
            return attempt()
        except Exception as error:
            if not was_in_the_way(error) or fence.is_lost():
                raise
            logger.info("%s met another transaction and begins anew (%d): %s", name, tries, error)
        # The first at once; those who meet again and again draw apart.
        time.sleep(random.uniform(0, min(_LONGEST_PAUSE_SECONDS, 0.001 * (2**tries - 2))))
    return attempt()


def was_in_the_way(error: BaseException | None) -> bool:
    """Whether it comes, through whatever it was raised from, of a statement that another transaction has stopped."""
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
