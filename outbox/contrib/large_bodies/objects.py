"""The objects of large bodies in a storage of Django: their names, their upload, and the codec that reads them.

The name of an object is computed from the message id. So an erasure and the removal of orphans need no table of
objects. See decision 265.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, BinaryIO, Final, cast
from uuid import UUID

from django.core.checks import CheckMessage, Error
from django.core.files.base import ContentFile
from django.core.files.storage import InvalidStorageError, Storage, storages

from outbox.broker.database.executor import Executor
from outbox.codec import OWN_CONTENT_TYPES, REFERENCE_CONTENT_TYPE, Codecs, UnreadBody
from outbox.contrib.django.database.aliases import broker_executor
from outbox.contrib.django.engine.broker import BodyStep
from outbox.contrib.django.settings.conf import get_settings, settings_of
from outbox.contrib.large_bodies.locks import hold
from outbox.contrib.large_bodies.reference import Reference, unread_body
from outbox.contrib.large_bodies.settings import DeclaredLargeBodies, LargeBodySettings
from outbox.errors import ConfigurationError, HandlerNotStarted, InvalidMessage, MissingBody, SendFailed
from outbox.hooks import Draft, ShownBody
from outbox.message import Message
from outbox.utils.faults import point
from outbox.utils.safe_text import error_line

FOLDER: Final = "outbox"


def declared_bodies() -> DeclaredLargeBodies | None:
    """Return OUTBOX['LARGE_BODIES']."""
    return settings_of(LargeBodySettings).large_bodies


def name_of(message_id: UUID) -> str:
    """Return the name of the object of a message: the day and hour of the id (UUIDv7), and the id."""
    return f"{FOLDER}/{built_at(message_id):%Y-%m-%d/%H}/{message_id}"


def built_at(message_id: UUID) -> datetime:
    """Return the time in an id of a large message, by the publisher's clock."""
    return datetime.fromtimestamp((message_id.int >> 80) / 1000, UTC)


def storage_of(declared: DeclaredLargeBodies) -> Storage:
    """Return the storage. Raises ConfigurationError if STORAGES does not have the alias."""
    try:
        return storages[declared.storage]
    except InvalidStorageError as error:
        raise ConfigurationError(
            f"OUTBOX['LARGE_BODIES']['storage'] = {declared.storage!r} cannot be used: {error} Add the "
            "alias to STORAGES."
        ) from error


def check(**options: Any) -> list[CheckMessage]:
    """Return an error of `manage.py check` if the storage cannot be used."""
    try:
        declared = declared_bodies()
    except ConfigurationError:
        # The check of the core reports wrong settings.
        return []
    try:
        if declared is not None:
            storage_of(declared)
    except ConfigurationError as error:
        return [Error(str(error), id="outbox.E041")]
    return []


# -- publishing ------------------------------------------------------------------------------------


def upload(declared: DeclaredLargeBodies, message_id: UUID, reference: Reference, body: bytes) -> None:
    """Store the object of a large body. Raises SendFailed or ConfigurationError."""
    storage, name = storage_of(declared), reference.name
    point("large_body.before_upload")
    try:
        stored = storage.save(name, ContentFile(body))
    except Exception as error:
        raise SendFailed(
            f"the body of message {message_id} ({reference.size:,} bytes) could not be stored in the storage "
            f"{declared.storage!r}: {error_line(error)}. Nothing was published. Try again when the storage answers."
        ) from error
    if stored.replace("\\", "/") != name:
        storage.delete(stored)
        raise ConfigurationError(
            f"the storage {declared.storage!r} stored the object {name!r} under the name {stored!r}, so outbox "
            "could not find it again. Nothing was published. Use a storage that keeps names."
        )
    point("large_body.after_upload")


def keep(run: Executor | None, declared: DeclaredLargeBodies, messages: Sequence[Message]) -> None:
    """Make sure that the objects of these messages exist, and stay while the transaction of `run` is open.

    Raises InvalidMessage for an object that is gone, or a message that was built too long ago. Raises SendFailed if the
    storage does not answer. `run` is None for a broker without a database.
    """
    large = [one for one in messages if one.content_type == REFERENCE_CONTENT_TYPE]
    if not large:
        return
    if run is not None:
        hold(run, (one.message_id for one in large))
    now = datetime.now(UTC)
    for one in large:
        waited = (now - one.born_at).total_seconds()
        if waited > declared.longest_wait_seconds or not _exists(declared, one):
            raise InvalidMessage(
                f"message {one.message_id} for topic {one.topic!r} has a large body, which was uploaded "
                f"{waited / 3600:,.1f} hours ago and may be removed. Nothing was published. Build the message again "
                "with message(…), and publish it at once."
            )


def _exists(declared: DeclaredLargeBodies, message: Message) -> bool:
    try:
        return storage_of(declared).exists(name_of(message.message_id))
    except ConfigurationError:
        raise
    except Exception as error:
        raise SendFailed(
            f"message {message.message_id} for topic {message.topic!r}: the storage {declared.storage!r} does not "
            f"answer whether it has the body: {error_line(error)}. Nothing was published."
        ) from error


@contextmanager
def kept(declared: DeclaredLargeBodies, messages: Sequence[Message]) -> Iterator[None]:
    """Do the same as `keep` for the block, in a transaction of its own on the broker. The block sends the messages."""
    if not get_settings().has_database or not any(one.content_type == REFERENCE_CONTENT_TYPE for one in messages):
        keep(None, declared, messages)
        yield
        return
    with broker_executor() as run, run.connection.transaction():
        keep(run, declared, messages)
        yield


@dataclass(frozen=True, slots=True)
class LargeBodies(BodyStep):
    """Stores a body beyond a size in the storage before its message is published."""

    declared: DeclaredLargeBodies

    def encode(self, draft: Draft) -> None:
        """Replace a large body by a reference. The upload is done when the message is valid, so it is not in vain."""
        if len(draft.body) > self.declared.beyond_bytes:
            reference = Reference.to(name_of(draft.message_id), draft.content_type, draft.body)
            draft.when_valid.append(partial(upload, self.declared, draft.message_id, reference, draft.body))
            draft.body, draft.content_type = reference.encoded(), REFERENCE_CONTENT_TYPE

    def before_append(self, run: Executor, messages: Sequence[Message]) -> None:
        """Make sure that the objects exist, and stay until the messages are visible."""
        keep(run, self.declared, messages)

    def while_sending(self, messages: Sequence[Message]) -> AbstractContextManager[None]:
        """Return the block in which no process removes the objects."""
        return kept(self.declared, messages)


def step() -> LargeBodies | None:
    """Return the step of a process that stores large bodies; None without LARGE_BODIES."""
    declared = declared_bodies()
    return None if declared is None else LargeBodies(declared)


# -- reading ---------------------------------------------------------------------------------------


class LargeBodyCodec:
    """Decodes a reference to the body that it names, which is read when it is used."""

    content_type = REFERENCE_CONTENT_TYPE

    def __init__(self, codecs: Codecs) -> None:
        self._declared = declared_bodies()
        self._codecs = codecs

    def encode(self, body: Any) -> bytes:
        raise TypeError("set OUTBOX['LARGE_BODIES']: this codec only decodes")

    def decode(self, data: bytes) -> Any:
        """Return the unread body. A body in the form of a part is read now: if it is encrypted, it may be erased."""
        unread = self.unread(data)
        return unread.read() if unread.content_type.startswith(OWN_CONTENT_TYPES) else unread

    def unread(self, data: bytes) -> UnreadBody:
        """Return the body of this reference. Raises ValueError for another text."""
        return unread_body(Reference.parsed(data), self._open, self._codecs.decode)

    def _open(self, reference: Reference) -> BinaryIO:
        name, declared = reference.name, self._declared
        if declared is None:
            raise HandlerNotStarted(
                f"the body of the message is the object {name}, and this process has no OUTBOX['LARGE_BODIES']. The "
                "message waits. Set LARGE_BODIES as the publisher does."
            )
        try:
            storage = storage_of(declared)
            try:
                return cast(BinaryIO, storage.open(name, "rb"))
            except FileNotFoundError:
                is_there = False
            except Exception:
                # Some storages raise an error of their own for a missing object.
                is_there = storage.exists(name)
                if is_there:
                    raise
        except Exception as error:
            raise HandlerNotStarted(
                f"the object {name} of a large body cannot be read from the storage {declared.storage!r} now: "
                f"{error_line(error)}. The message waits."
            ) from error
        raise MissingBody(
            f"the object {name} of a large body is not in the storage {declared.storage!r}: it was deleted there, or "
            "the broker was restored from a backup that is older than its removal. Restore the object, then replay the "
            "message."
        )


def shown(body: bytes) -> ShownBody:
    """Return what a page shows instead of a large body."""
    try:
        reference = Reference.parsed(body)
    except ValueError:
        return ShownBody("The body is an object in the storage of large bodies. This page does not read it.")
    return ShownBody(
        f"The body is the object {reference.name} in the storage of large bodies. This page does not read it.",
        reference.size,
        reference.content_type,
    )


# -- removing --------------------------------------------------------------------------------------


def delete(message_ids: Iterable[UUID], *, dry_run: bool = False) -> int:
    """Delete the objects of these messages, and return how many there were. Raises the errors of the storage."""
    declared = declared_bodies()
    if declared is None:
        return 0
    storage, count = storage_of(declared), 0
    for message_id in message_ids:
        # Only ids of version 7 have a time, and only such messages have objects.
        if message_id.version == 7 and storage.exists(name_of(message_id)):
            count += 1
            if not dry_run:
                point("large_body.before_delete")
                storage.delete(name_of(message_id))
    return count
