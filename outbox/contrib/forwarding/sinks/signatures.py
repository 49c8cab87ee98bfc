"""Signs and verifies webhooks by the Standard Webhooks scheme.

The scheme has two kinds of signatures: `v1` (HMAC-SHA256, one shared secret `whsec_…`) and `v1a` (ed25519, a secret key
`whsk_…` of the sender and a public key `whpk_…` of the receiver; needs the package cryptography). A receiver in Python
can use `verify` directly. docs/forwarding.md shows the same checks with openssl.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from outbox.errors import ConfigurationError, OutboxError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PREFIX: Final = "whsec_"
SECRET_KEY_PREFIX: Final = "whsk_"
PUBLIC_KEY_PREFIX: Final = "whpk_"
# The allowed difference in seconds between a timestamp and the receiver's clock.
TOLERANCE_SECONDS: Final = 300
_LEAST_BYTES, _MOST_BYTES = 24, 64
# A timestamp may have at most this many digits. No clock gives more digits, and Python refuses to convert thousands of
# digits.
_MOST_DIGITS: Final = 18
_SHOWN_CHARACTERS: Final = 200
# `verify` looks at so many signatures of a request. A sender has one signature per secret, and each check of an ed25519
# signature costs time.
_MOST_SIGNATURES: Final = 20

Signer = Callable[[bytes], str]
"""Returns the signature of some content, with its version: `v1,…` or `v1a,…`."""


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


def key_pair() -> tuple[str, str]:
    """Return a new secret key `whsk_…` for the sender, and its public key `whpk_…` for the receiver."""
    _require_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    secret = Ed25519PrivateKey.generate()
    return SECRET_KEY_PREFIX + _text(secret.private_bytes_raw()), PUBLIC_KEY_PREFIX + _text(
        secret.public_key().public_bytes_raw()
    )


def signer(secret: str) -> Signer:
    """Return the function that signs with a secret `whsec_…` (v1) or a secret key `whsk_…` (v1a).

    Raises ConfigurationError, which does not show the secret.
    """
    if secret.startswith(SECRET_KEY_PREFIX):
        private = _secret_key(secret)
        return lambda content: "v1a," + _text(private.sign(content))
    key = secret_bytes(secret)
    return lambda content: "v1," + _text(hmac.digest(key, content, hashlib.sha256))


def sign(signers: Sequence[Signer], message_id: str, timestamp: int, body: bytes) -> str:
    """Return the value of the header webhook-signature.

    The value has one signature per signer, so the receiver needs one secret or public key only.
    """
    content = _content(message_id, timestamp, body)
    return " ".join(one(content) for one in signers)


def verify(
    secrets: Sequence[str],
    headers: Mapping[str, str],
    body: bytes,
    *,
    now: float,
    tolerance_seconds: float = TOLERANCE_SECONDS,
) -> str:
    """Check a received webhook, with its unchanged body; return the message's id. `now` is the time since the epoch.

    `secrets` are the secrets `whsec_…` and public keys `whpk_…` that are valid now. One valid signature is enough.

    Store this id in the same transaction as the effect of the webhook. If the sender or an attacker repeats the request
    within the tolerance, the id is the same. If you accept the secrets of several senders, store the sender with the
    id, because two senders may choose the same id. Raises InvalidSignature.
    """
    given = {name.lower(): value for name, value in headers.items()}
    message_id, stamp = given.get("webhook-id", ""), given.get("webhook-timestamp", "")
    if not message_id or not stamp:
        raise InvalidSignature("the request has no header webhook-id or no header webhook-timestamp: refuse it.")
    # Check the signature first. Until the signature is checked, any caller may have written the headers, so their
    # values are not used.
    if not _is_signed(secrets, message_id, stamp, body, given.get("webhook-signature", "")):
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


_Check = Callable[[bytes, Sequence[tuple[str, bytes]]], bool]
"""Whether one of some signatures, given with their versions, is a signature of some content."""


def _is_signed(secrets: Sequence[str], message_id: str, stamp: str, body: bytes, header: str) -> bool:
    """Whether one of the secrets made a signature in the header."""
    checks = [_check_of_key(one) if one.startswith(PUBLIC_KEY_PREFIX) else _check_of_secret(one) for one in secrets]
    parts = [part.partition(",") for part in header.split(" ")[:_MOST_SIGNATURES]]
    given = [(version, _encoded(signature)) for version, _, signature in parts]
    content = _content(message_id, stamp, body)
    return any(check(content, given) for check in checks)


def _check_of_secret(secret: str) -> _Check:
    key = secret_bytes(secret)

    def check(content: bytes, given: Sequence[tuple[str, bytes]]) -> bool:
        expected = _text(hmac.digest(key, content, hashlib.sha256)).encode()
        # The comparison takes constant time.
        return any(version == "v1" and hmac.compare_digest(expected, one) for version, one in given)

    return check


def _check_of_key(public: str) -> _Check:
    raw = _decoded(public, PUBLIC_KEY_PREFIX, (32,))
    _require_cryptography()
    from cryptography.exceptions import InvalidSignature as Unequal
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    key = Ed25519PublicKey.from_public_bytes(raw)

    def is_valid(signature: bytes, content: bytes) -> bool:
        try:
            key.verify(base64.b64decode(signature, validate=True), content)
        except (Unequal, ValueError):
            return False
        return True

    return lambda content, given: any(version == "v1a" and is_valid(one, content) for version, one in given)


def _secret_key(secret: str) -> Ed25519PrivateKey:
    """Return the key of `whsk_…`: 32 bytes, or 64 bytes whose second half is the public key, as libsodium writes it."""
    raw = _decoded(secret, SECRET_KEY_PREFIX, (32, 64))
    _require_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.from_private_bytes(raw[:32])
    if raw[32:] not in (b"", private.public_key().public_bytes_raw()):
        raise ConfigurationError(
            f"a webhook secret {SECRET_KEY_PREFIX!r} has a second half that is not its public key: create a new pair "
            "with outbox.contrib.forwarding.sinks.signatures.key_pair()."
        )
    return private


def _require_cryptography() -> None:
    if importlib.util.find_spec("cryptography") is None:
        raise ConfigurationError(
            f"webhook keys {SECRET_KEY_PREFIX}… and {PUBLIC_KEY_PREFIX}… need cryptography: install "
            "outbox-transactional[webhook-ed25519]."
        )


def _decoded(key: str, prefix: str, lengths: Sequence[int]) -> bytes:
    try:
        raw = base64.b64decode(key.removeprefix(prefix), validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) not in lengths:
        raise ConfigurationError(
            f"a webhook key {prefix!r} must be this prefix and the base64 text of an ed25519 key: create a pair with "
            "outbox.contrib.forwarding.sinks.signatures.key_pair()."
        )
    return raw


def _content(message_id: str, timestamp: int | str, body: bytes) -> bytes:
    return _encoded(f"{message_id}.{timestamp}.") + body


def _encoded(text: str) -> bytes:
    """Encode as UTF-8. A server may pass headers with lone surrogates, which the strict codec refuses."""
    return text.encode(errors="surrogatepass")


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
