"""The option of `publish` that encrypts a body."""

from __future__ import annotations

from dataclasses import dataclass

from outbox import hooks
from outbox.contrib.encryption.settings import ENCRYPTED_CONTENT_TYPE
from outbox.errors import BrokerUnavailable, ConfigurationError, HandlerNotStarted
from outbox.hooks import Draft, Option
from outbox.utils.safe_text import shown_text


@dataclass(frozen=True, slots=True)
class Subject(Option):
    """The person or account that a body is about: a text, an int or a UUID.

    The body is encrypted with the key of the subject. Deleting this key erases the body (docs/operations/erasure.md).
    """

    value: object

    def encode(self, draft: Draft) -> None:
        """Encrypt the body. Raises UsageError, ConfigurationError, or BrokerUnavailable if the key cannot be read."""
        if ENCRYPTED_CONTENT_TYPE not in hooks.body_forms:
            raise ConfigurationError(
                f"topic {draft.topic!r}: Subject(…) was passed, but INSTALLED_APPS lacks 'outbox.contrib.encryption'. "
                "Nothing was published. Add the app."
            )
        # The library `cryptography` is imported only in a process that encrypts.
        from outbox.contrib.encryption.keys import check_subject, subject_keys

        try:
            key_id, key = subject_keys().key_for(check_subject(self.value))
        except HandlerNotStarted as error:
            raise BrokerUnavailable(shown_text(error)) from error
        from outbox.contrib.encryption.envelope import encrypt

        draft.body = encrypt(key_id, key, draft.content_type, draft.body)
        draft.content_type = ENCRYPTED_CONTENT_TYPE
