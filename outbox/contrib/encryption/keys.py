"""The keys of subjects, in the table outbox_subject_key on the alias OUTBOX['KEY_DATABASE'].

The row of a deleted key stays, without key and subject. So a deleted key differs from a missing key: the message of a
missing key waits, because a restored key database may lack newer keys.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final
from uuid import UUID

from django.db import DatabaseError, connections, transaction
from django.utils import timezone

from outbox import hooks
from outbox.codec import Codecs
from outbox.contrib.django.database.transactions import in_test_case
from outbox.contrib.django.settings.conf import settings_of
from outbox.contrib.encryption.models import SubjectKey
from outbox.contrib.encryption.settings import ENCRYPTED_CONTENT_TYPE, EncryptionSettings
from outbox.erased import ERASED, Erased
from outbox.errors import ConfigurationError, HandlerNotStarted, InvalidMessage, UsageError
from outbox.hooks import ShownBody
from outbox.names import is_text
from outbox.utils.safe_text import shown_value

# A process keeps keys in memory for this time. So other processes use a deleted key for at most this time.
CACHE_SECONDS: Final = 60.0
_CACHED: Final = 10_000
# Of AES-256.
_KEY_BYTES: Final = 32
LONGEST_SUBJECT: Final = 255


class StoredKeys:
    """The keys of subjects in the key database of these settings."""

    def __init__(self, settings: EncryptionSettings) -> None:
        if settings.key_database is None:
            raise ConfigurationError(
                "OUTBOX['KEY_DATABASE'] is not set: name the alias of the database with the keys of subjects."
            )
        try:
            # Only projects that encrypt need the library `cryptography`.
            from outbox.contrib.encryption.envelope import KeyEncryption
        except ImportError as error:
            raise ConfigurationError(
                f"OUTBOX['KEY_DATABASE'] needs the library cryptography ({error}): install "
                "outbox-transactional[encryption]."
            ) from error
        self._alias = settings.key_database
        self._encryption = KeyEncryption(settings.key_encryption_keys)
        # Their second argument is the present period of CACHE_SECONDS.
        self._by_subject = lru_cache(_CACHED)(lambda subject, period: self._find_or_create(subject))
        self._by_id = lru_cache(_CACHED)(lambda key_id, period: self._find(key_id))

    def key_for(self, subject: str) -> tuple[UUID, bytes]:
        """Return the id and the key of a subject. Creates the key, and commits it, if the subject has none."""
        if in_test_case(connections[self._alias]):
            # The end of the test removes the key.
            return self._find_or_create(subject)
        return self._by_subject(subject, _period())

    def key_of(self, key_id: UUID) -> bytes | None:
        """Return the key with this id; None if it is deleted. Raises HandlerNotStarted if it cannot be read now."""
        try:
            return self._by_id(key_id, _period())
        except HandlerNotStarted:
            # No invoker runs now that would keep this thread's connection for the next call, or close it.
            if not connections[self._alias].in_atomic_block:
                connections[self._alias].close()
            raise

    def _find_or_create(self, subject: str) -> tuple[UUID, bytes]:
        connection = connections[self._alias]
        with self._answering("The message was not published."):
            # In manual-commit mode, the row would belong to a transaction too.
            if not connection.get_autocommit() and not in_test_case(connection):
                raise UsageError(
                    f"a message for a subject was published in a transaction on {self._alias!r}, the alias of "
                    "OUTBOX['KEY_DATABASE']. A rollback would remove the new key of the subject, and its messages "
                    "could never be read. Nothing was published. Publish outside of this transaction."
                )
            row, _ = SubjectKey.objects.using(self._alias).get_or_create(
                subject=subject,
                defaults={
                    "key_id": uuid.uuid4(),
                    "wrapped": self._encryption.wrap(os.urandom(_KEY_BYTES)),
                    "created_at": timezone.now(),
                },
            )
        return row.key_id, self._encryption.unwrap(bytes(row.wrapped or b""))

    def _find(self, key_id: UUID) -> bytes | None:
        with self._answering("The message waits."):
            row = SubjectKey.objects.using(self._alias).filter(key_id=key_id).first()
        connection = connections[self._alias]
        if connection.settings_dict["OPTIONS"].get("pool") and not connection.in_atomic_block:
            # Other threads may need it while the handler runs.
            connection.close()
        if row is None:
            raise HandlerNotStarted(
                f"the key database {self._alias!r} does not have the key {key_id} of a message, and it was not deleted "
                "there. The message waits. If the key database was restored, restore a newer backup. If the key is "
                f"lost for ever, `outbox_subject_key delete --key-id {key_id}` makes its messages erased."
            )
        if row.deleted_at is not None:
            return None
        try:
            return self._encryption.unwrap(bytes(row.wrapped or b""))
        except ConfigurationError as error:
            raise HandlerNotStarted(f"{error} The message waits.") from error

    @contextmanager
    def _answering(self, consequence: str) -> Iterator[None]:
        try:
            yield
        except DatabaseError as error:
            raise HandlerNotStarted(
                f"the keys of subjects on {self._alias!r} (OUTBOX['KEY_DATABASE']) cannot be read: "
                f"{str(error).strip()}. {consequence} If the table is missing, run `manage.py migrate "
                f"--database={self._alias}`."
            ) from error

    def forget(self) -> None:
        """Forget the keys that this process keeps in memory."""
        self._by_subject.cache_clear()
        self._by_id.cache_clear()

    # -- actions of operators --------------------------------------------------------------------------

    def id_of(self, subject: str) -> UUID | None:
        """Return the id of a subject's key; None if the subject has no key."""
        found: UUID | None = (
            SubjectKey.objects.using(self._alias).filter(subject=subject).values_list("key_id", flat=True).first()
        )
        return found

    def deleted(self) -> set[UUID]:
        """Return the ids of all deleted keys."""
        rows = SubjectKey.objects.using(self._alias).filter(deleted_at__isnull=False)
        return set(rows.values_list("key_id", flat=True))

    def delete(self, key_id: UUID) -> bool:
        """Delete a key and the name of its subject, and keep its id. Return False if it was deleted before."""
        rows = SubjectKey.objects.using(self._alias)
        with transaction.atomic(using=self._alias):
            rows.get_or_create(key_id=key_id, defaults={"created_at": timezone.now()})
            changed = rows.filter(key_id=key_id, deleted_at__isnull=True).update(
                subject=None, wrapped=None, deleted_at=timezone.now()
            )
        self.forget()
        return bool(changed)

    def rotate(self, *, dry_run: bool) -> int:
        """Encrypt all keys with the first key-encrypting key, and return the number of changed rows."""
        rows, changed = SubjectKey.objects.using(self._alias), 0
        for row in rows.filter(deleted_at__isnull=True).iterator(chunk_size=1000):
            wrapped = bytes(row.wrapped or b"")
            if self._encryption.is_current(wrapped):
                continue
            changed += 1
            key = self._encryption.unwrap(wrapped)
            if not dry_run:
                # Only if the key was not deleted meanwhile.
                rows.filter(key_id=row.key_id, deleted_at__isnull=True).update(wrapped=self._encryption.wrap(key))
        return changed


def _period() -> int:
    return int(time.monotonic() / CACHE_SECONDS)


_stored: tuple[EncryptionSettings, StoredKeys] | None = None


def subject_keys() -> StoredKeys:
    """Return the keys of this process; the same object until the settings change. Raises ConfigurationError."""
    global _stored
    settings = settings_of(EncryptionSettings)
    if _stored is None or _stored[0] is not settings:
        _stored = settings, StoredKeys(settings)
    return _stored[1]


def check_subject(subject: object) -> str:
    """Return the subject as a text. Raises InvalidMessage."""
    text = str(subject) if isinstance(subject, (int, UUID)) and not isinstance(subject, bool) else subject
    if not isinstance(text, str) or not text or len(text) > LONGEST_SUBJECT or not is_text(text):
        raise InvalidMessage(
            f"subject={shown_value(subject)} must be a text of 1 to {LONGEST_SUBJECT} characters, an int or a UUID. "
            "Nothing was published."
        )
    return text


# -- reading bodies -------------------------------------------------------------------------------------


class EncryptedCodec:
    """Decodes encrypted bodies. The decrypted body is decoded by the codec of its own content type.

    In a process without the keys, encrypted messages wait.
    """

    content_type = ENCRYPTED_CONTENT_TYPE

    def __init__(self, codecs: Codecs) -> None:
        """Raises ConfigurationError."""
        self._codecs = codecs
        self._keys = None if alias_of_settings() is None else subject_keys()

    def encode(self, body: Any) -> bytes:
        raise TypeError("pass Subject(…) to publish: this codec only decodes")

    def decode(self, data: bytes) -> Any | Erased:
        """Return the decoded body; ERASED if the subject's key is deleted."""
        if self._keys is None:
            raise HandlerNotStarted(
                "the body of the message is encrypted, and this process has no OUTBOX['KEY_DATABASE']. The message "
                "waits. Set KEY_DATABASE and KEY_ENCRYPTION_KEYS as the publisher does."
            )
        # Only projects that encrypt need the library `cryptography`.
        from outbox.contrib.encryption.envelope import decrypt

        found = decrypt(data, self._keys.key_of)
        return ERASED if found is None else self._codecs.decode(*found)


def shown(body: bytes) -> ShownBody:
    """Return what a page shows instead of an encrypted body."""
    return ShownBody("The body is encrypted for a subject, and this page does not decrypt it.")


# -- the table ------------------------------------------------------------------------------------------


def alias_of_settings() -> str | None:
    """Return OUTBOX['KEY_DATABASE']."""
    return settings_of(EncryptionSettings).key_database


def after_migrate(*, using: str, **options: Any) -> None:
    """Receive the signal post_migrate, and create the table of the keys on the alias of the settings."""
    if using == alias_of_settings():
        create_key_table(using)


def create_key_table(alias: str) -> None:
    """Create the table of the subjects' keys, if it is missing. No migration creates it on the other aliases."""
    connection = connections[alias]
    if SubjectKey._meta.db_table not in connection.introspection.table_names():
        with connection.schema_editor() as editor:
            editor.create_model(SubjectKey)


# -- deleted keys after a restore -----------------------------------------------------------------------


def lists_of_deleted_keys() -> list[Callable[..., None]]:
    """Return the functions that record deleted keys outside of the databases (`outbox.hooks.add_list`)."""
    found = (hooks.resolved(path)() for path in hooks.lists)
    return [record for record in found if record is not None]


def delete_for(key_id: UUID, *, reason: str) -> dict[str, Any]:
    """Delete the key of a subject, and record the deletion. Raises UsageError or OutboxError."""
    if not reason:
        raise UsageError("--reason is missing: the list of erasures stores the reason. Nothing was erased.")
    for record in lists_of_deleted_keys():
        record("subject", str(key_id), reason)
    return {"deleted": subject_keys().delete(key_id)}


def deleted_keys() -> set[UUID] | None:
    """Return the deleted keys; None if this process has no key database."""
    return None if alias_of_settings() is None else subject_keys().deleted()


def delete_key(key_id: UUID) -> bool:
    """Delete the key once more. Return False if it is deleted."""
    return subject_keys().delete(key_id)
