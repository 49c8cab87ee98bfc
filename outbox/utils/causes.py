"""The causes of an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

# The class of an error may define properties of these names, which may raise.
_cause: Final[Any] = BaseException.__dict__["__cause__"].__get__
_context: Final[Any] = BaseException.__dict__["__context__"].__get__


def causes(error: BaseException, *, contexts: bool = False) -> Iterator[BaseException]:
    """Yield the error, the cause of the error (`raise … from`), the cause of this cause, and so on.

    With `contexts`, an error without a cause is followed by the error during whose handling it was raised.
    """
    # An error can be its own cause (`raise error from error`).
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        # Not `or`: an error may define `__bool__`, which may raise.
        cause = _cause(current)
        current = _context(current) if cause is None and contexts else cause
