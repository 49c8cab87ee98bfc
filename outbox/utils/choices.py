"""Values of enumerations that a caller has given."""

from __future__ import annotations

from enum import StrEnum


def right_choice(kind: type[StrEnum], value: object) -> str:
    """Return how to write the member that was meant by a value of another class, or all members; '' for a member."""
    if isinstance(value, kind):
        return ""
    meant = [one for one in kind if isinstance(value, str) and one.casefold() == value.replace("-", "_").casefold()]
    return " or ".join(f"{kind.__name__}.{one.name}" for one in meant or kind)
