"""Erased messages: the marks that an erasure leaves in a message, and the list of erasures.

An erasure replaces the body of a message by nothing and its content type by ERASED_CONTENT_TYPE. The codec of another
content type may return ERASED too, if it has lost what it needs to decode the body.
"""

from __future__ import annotations

import hashlib
import hmac
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


def fingerprint(secret: str, topic: str, key: str) -> str:
    """Return the keyed hash (HMAC-SHA256, hexadecimal) of a topic's key.

    The list of erasures has this hash instead of the key. Without the secret, the hash of a guessed key cannot be
    computed.
    """
    return hmac.new(secret.encode(), f"{topic}\x00{key}".encode(), hashlib.sha256).hexdigest()
