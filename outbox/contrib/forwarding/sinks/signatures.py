"""Signs and verifies webhooks by the Standard Webhooks scheme: `v1` (HMAC-SHA256, one shared secret `whsec_…`).

A receiver in Python can use `verify` directly. docs/forwarding.md shows the same check with openssl.
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
# The allowed difference in seconds between a timestamp and the receiver's clock.
TOLERANCE_SECONDS: Final = 300
_LEAST_BYTES, _MOST_BYTES = 24, 64
# A timestamp may have at most this many digits. No clock gives more digits, and Python refuses to convert thousands of
# digits.
_MOST_DIGITS: Final = 18
_SHOWN_CHARACTERS: Final = 200


class InvalidSignature(OutboxError):
    """The request has no valid, recent signature of a known secret. Refuse the request."""


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
    content = _content(message_id, str(timestamp), body)
    return " ".join(_signature(key, content) for key in keys)


def verify(
    secrets: Sequence[str],
    headers: Mapping[str, str],
    body: bytes,
    *,
    now: float,
    tolerance_seconds: float = TOLERANCE_SECONDS,
) -> str:
    """Check a received webhook, with its unchanged body; return the message's id. `now` is the time since the epoch.

    `secrets` are the secrets `whsec_…` that are valid now. One valid signature is enough.

    Store this id in the same transaction as the effect of the webhook. If the sender or an attacker repeats the request
    within the tolerance, the id is the same. If you accept the secrets of several senders, store the sender with the
    id, because two senders may choose the same id. Raises InvalidSignature, or ConfigurationError for a wrong secret.
    """
    given = {name.lower(): value for name, value in headers.items()}
    message_id, stamp = given.get("webhook-id", ""), given.get("webhook-timestamp", "")
    if not message_id or not stamp:
        raise InvalidSignature("the request has no header webhook-id or no header webhook-timestamp: refuse it.")
    # Check the signature first. Until the signature is checked, any caller may have written the headers, so their
    # values are not used. The comparison takes constant time.
    given_signatures = [_encoded(one) for one in given.get("webhook-signature", "").split(" ")]
    expected = [_signature(secret_bytes(one), _content(message_id, stamp, body)).encode() for one in secrets]
    if not any(hmac.compare_digest(one, other) for one in expected for other in given_signatures):
        raise InvalidSignature(
            f"no signature of webhook {message_id[:_SHOWN_CHARACTERS]!r} matches a known secret: refuse the request."
        )
    if len(stamp) > _MOST_DIGITS or not stamp.isascii() or not stamp.isdigit():
        raise InvalidSignature(
            f"the timestamp of webhook {message_id!r} is not a number of seconds: correct its sender, which has the "
            "secret."
        )
    if abs(now - int(stamp)) > tolerance_seconds:
        raise InvalidSignature(
            f"webhook {message_id!r} was signed {now - int(stamp):.0f} s ago by the clocks of sender and receiver; "
            f"the limit is {tolerance_seconds:g} s. The request is a replay, or one of the clocks is wrong: refuse the "
            "request and compare the clocks."
        )
    return message_id


def _signature(key: bytes, content: bytes) -> str:
    return "v1," + base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode()


def _content(message_id: str, timestamp: str, body: bytes) -> bytes:
    return _encoded(f"{message_id}.{timestamp}.") + body


def _encoded(text: str) -> bytes:
    """Encode as UTF-8. A server may pass headers with lone surrogates, which the strict codec refuses."""
    return text.encode(errors="surrogatepass")
