"""The causes of an error."""

from __future__ import annotations

from collections.abc import Iterator


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
        current = current.__cause__ or (current.__context__ if contexts else None)
