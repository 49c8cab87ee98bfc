"""Signing webhooks and verifying them, by the Standard Webhooks scheme (version v1: HMAC-SHA256).

A receiver in Python can use `verify` as it is; docs/forwarding.md shows the same with openssl.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Final

from outbox.errors import ConfigurationError, OutboxError

PREFIX: Final = "whsec_"
# How far a timestamp may be from the receiver's clock.
TOLERANCE_SECONDS: Final = 300
_LEAST_BYTES, _MOST_BYTES = 24, 64


class InvalidSignature(OutboxError):
    """The request was not signed with a known secret, or not lately; it must not be acted on."""


def secret_bytes(secret: str) -> bytes:
    """The key that `whsec_…` stands for. Raises ConfigurationError, without showing the secret."""
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not secret.startswith(PREFIX) or not _LEAST_BYTES <= len(key) <= _MOST_BYTES:
        raise ConfigurationError(
            f"a webhook secret is {PREFIX!r} and the base64 text of {_LEAST_BYTES} to {_MOST_BYTES} random bytes: "
            f"`echo {PREFIX}$(openssl rand -base64 32)` makes one."
        )
    return key


def sign(keys: Sequence[bytes], message_id: str, timestamp: int, body: bytes) -> str:
    """The header webhook-signature: one signature per key, so that a receiver may know either of two."""
    return " ".join("v1," + _mac(key, message_id, timestamp, body) for key in keys)


def verify(
    secrets: Sequence[str],
    headers: Mapping[str, str],
    body: bytes,
    *,
    now: float,
    tolerance_seconds: float = TOLERANCE_SECONDS,
) -> str:
    """Check a received webhook, its body as it came; returns its id. `now` is the time since the epoch.

    Keep the id with the effect, in one transaction: a repetition, ours or an attacker's within the tolerance, has the
    same. Raises InvalidSignature.
    """
    given = {name.lower(): value for name, value in headers.items()}
    message_id, stamp = given.get("webhook-id", ""), given.get("webhook-timestamp", "")
    if not message_id or not stamp.isascii() or not stamp.isdigit():
        raise InvalidSignature("the headers webhook-id and webhook-timestamp are missing or malformed.")
    if abs(now - int(stamp)) > tolerance_seconds:
        raise InvalidSignature(
            f"webhook {message_id} was signed {now - int(stamp):.0f} s ago by the clocks of sender and receiver, and "
            f"{tolerance_seconds:g} s are allowed: a replay, or a clock that is wrong."
        )
    versions = [part.partition(",") for part in given.get("webhook-signature", "").split(" ")]
    signatures = [signature for version, _, signature in versions if version == "v1"]
    for secret in secrets:
        expected = _mac(secret_bytes(secret), message_id, int(stamp), body).encode()
        if any(hmac.compare_digest(expected, one.encode()) for one in signatures):
            return message_id
    raise InvalidSignature(f"no signature of webhook {message_id} fits a known secret.")


def _mac(key: bytes, message_id: str, timestamp: int, body: bytes) -> str:
    signed = f"{message_id}.{timestamp}.".encode() + body
    return base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
