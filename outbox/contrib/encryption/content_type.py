"""The content type of an encrypted body."""

from __future__ import annotations

from typing import Final

from outbox.codec import OWN_CONTENT_TYPES

ENCRYPTED_CONTENT_TYPE: Final = f"{OWN_CONTENT_TYPES}encrypted"
