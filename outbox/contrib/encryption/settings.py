"""The settings of encryption per subject, and the content type of an encrypted body."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from outbox.codec import OWN_CONTENT_TYPES
from outbox.contrib.django.settings.definition import or_none, setting, text, texts

ENCRYPTED_CONTENT_TYPE: Final = f"{OWN_CONTENT_TYPES}encrypted"


@dataclass(frozen=True, kw_only=True, slots=True)
class EncryptionSettings:
    """The settings of encryption in OUTBOX."""

    key_database: str | None = setting(
        None,
        or_none(text("alias")),
        section="erasing",
        meaning="alias of the database with the [keys of subjects](operations/erasure.md#encrypt-bodies-per-subject)",
    )
    key_encryption_keys: Sequence[str] = setting(
        (),
        texts("key"),
        secret=True,
        shown="`[]`",
        meaning="keys that encrypt the keys of subjects: 32 bytes in base64 each. The first key encrypts, each key "
        "decrypts",
    )
