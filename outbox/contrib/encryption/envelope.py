"""The format of encrypted bodies and of encrypted keys, both with AES-256-GCM.

    body:  version (1 byte) | key id (16) | nonce (12) | ciphertext
    key:   version (1 byte) | id of the key-encrypting key (8) | nonce (12) | ciphertext of the key (32)

The ciphertext of a body has the length of its content type (2 bytes), the content type, and the body itself.
The bytes before the ciphertext are authenticated. A new random nonce is drawn for each ciphertext.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Final
from uuid import UUID

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from outbox.errors import ConfigurationError

KEY_BYTES: Final = 32
_VERSION: Final = b"\x01"
_NONCE: Final = 12
_BODY_HEAD: Final = 1 + 16 + _NONCE
_KEY_HEAD: Final = 1 + 8 + _NONCE


def encrypt(key_id: UUID, key: bytes, content_type: str, body: bytes) -> bytes:
    """Return the encrypted body, which contains its content type."""
    head = _VERSION + key_id.bytes + os.urandom(_NONCE)
    named = content_type.encode()
    plain = len(named).to_bytes(2) + named + body
    return head + AESGCM(key).encrypt(head[-_NONCE:], plain, head)


def decrypt(data: bytes, key_of: Callable[[UUID], bytes | None]) -> tuple[str, bytes] | None:
    """Return the content type and the body; None if the key is deleted. Raises ValueError for damaged data."""
    head = data[:_BODY_HEAD]
    if len(head) < _BODY_HEAD or head[:1] != _VERSION:
        raise ValueError("it does not begin like an encrypted body of this version")
    key = key_of(UUID(bytes=head[1:17]))
    if key is None:
        return None
    try:
        plain = AESGCM(key).decrypt(head[-_NONCE:], data[_BODY_HEAD:], head)
    except InvalidTag:
        raise ValueError("it was changed after its encryption, or its key is another one") from None
    size = int.from_bytes(plain[:2])
    return plain[2 : 2 + size].decode(), plain[2 + size :]


class KeyEncryption:
    """Encrypts the keys of subjects with the first of the key-encrypting keys, and decrypts them with any of these."""

    def __init__(self, keys: Sequence[str]) -> None:
        """`keys`: 32 bytes in base64 each. Raises ConfigurationError for other texts."""
        self._keys = {hashlib.sha256(key).digest()[:8]: key for key in map(_key, keys)}
        if not self._keys:
            raise ConfigurationError(
                "OUTBOX['KEY_ENCRYPTION_KEYS'] is empty: add a key. `python -c 'import base64, os; "
                "print(base64.b64encode(os.urandom(32)).decode())'` prints a new one."
            )
        self._first = next(iter(self._keys))

    def wrap(self, key: bytes) -> bytes:
        """Return the encrypted key."""
        head = _VERSION + self._first + os.urandom(_NONCE)
        return head + AESGCM(self._keys[self._first]).encrypt(head[-_NONCE:], key, head)

    def unwrap(self, data: bytes) -> bytes:
        """Return the decrypted key. Raises ConfigurationError if its key-encrypting key is not in the settings."""
        head = data[:_KEY_HEAD]
        key = self._keys.get(head[1:9])
        if key is None:
            raise ConfigurationError(
                f"a subject's key was encrypted with the key-encrypting key {head[1:9].hex()}, which is not in "
                "OUTBOX['KEY_ENCRYPTION_KEYS']: add this key again. Remove an old key only after `outbox_subject_key "
                "rotate`."
            )
        try:
            return AESGCM(key).decrypt(head[-_NONCE:], data[_KEY_HEAD:], head)
        except InvalidTag:
            raise ConfigurationError(
                "the stored key of a subject is damaged. Restore it from a backup of OUTBOX['KEY_DATABASE']."
            ) from None

    def is_current(self, data: bytes) -> bool:
        """Whether a key was encrypted with the first of the key-encrypting keys."""
        return data[1:9] == self._first


def _key(text: str) -> bytes:
    try:
        key = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigurationError(
            f"OUTBOX['KEY_ENCRYPTION_KEYS'] has an entry that is not {KEY_BYTES} bytes in base64. `python -c 'import "
            "base64, os; print(base64.b64encode(os.urandom(32)).decode())'` prints a new key."
        )
    return key
