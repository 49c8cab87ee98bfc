"""Erased messages: the marks of a message whose content was removed because it was about a person.

The body of such a message is empty, and its content type is ERASED_CONTENT_TYPE. The codec of another content type may
return ERASED too, if it has lost what it needs to decode the body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

ERASED_CONTENT_TYPE: Final = "application/vnd.outbox.erased"
# The text that replaces an erased text.
ERASED_TEXT: Final = "(erased)"

# The headers that an erased message keeps. They have ids and times, which outbox and tracing tools write. All other
# headers are written by applications, so they may contain personal data.
KEPT_HEADERS: Final = frozenset({"outbox-timeout", "traceparent"})


@final
class Erased:
    """The type of ERASED."""

    def __repr__(self) -> str:
        return "ERASED"

    def __bool__(self) -> bool:
        return False


ERASED: Final = Erased()
"""The body of a delivery whose message is erased. ERASED is false, and has no fields."""


def kept_headers(headers: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the headers that stay in an erased message."""
    return {name: value for name, value in (headers or {}).items() if name in KEPT_HEADERS}
