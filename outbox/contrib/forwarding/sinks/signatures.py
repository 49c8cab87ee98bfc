"""Signs webhooks by the Standard Webhooks scheme: `v1` (HMAC-SHA256, one shared secret `whsec_…`).

A receiver verifies them with a library of Standard Webhooks, or as docs/forwarding.md shows with openssl.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

from outbox.errors import ConfigurationError

PREFIX: Final = "whsec_"
_LEAST_BYTES, _MOST_BYTES = 24, 64


def secret_bytes(secret: str) -> bytes:
    """Return the key encoded in `whsec_…`. Raises ConfigurationError, which does not show the secret."""
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not secret.startswith(PREFIX) or not _LEAST_BYTES <= len(key) <= _MOST_BYTES:
        raise ConfigurationError(
            f"a webhook secret must be {PREFIX!r} and the base64 text of {_LEAST_BYTES} to {_MOST_BYTES} random "
            f"bytes: create one with `echo {PREFIX}$(openssl rand -base64 32)`."
        )
    return key


def sign(keys: Sequence[bytes], message_id: str, timestamp: int, body: bytes) -> str:
    """Return the value of the header webhook-signature.

    The value has one signature per key (`secret_bytes`), so the receiver needs one secret only.
    """
    content = f"{message_id}.{timestamp}.".encode() + body
    return " ".join("v1," + base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode() for key in keys)
