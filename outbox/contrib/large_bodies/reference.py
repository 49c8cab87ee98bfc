"""The body of a large message is an object in a storage, and the message has a reference to it.

This is the claim check pattern. A message with a reference has the content type REFERENCE_CONTENT_TYPE. See decision
265.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, Final, cast

from outbox.codec import UnreadBody
from outbox.errors import HandlerNotStarted, OutboxError, UndecodableBody
from outbox.utils.safe_text import error_line, shown_text

# A reference with another name is refused: a message from elsewhere must not open any other object of the storage.
_NAME: Final = re.compile(r"outbox/\d{4}-\d\d-\d\d/\d\d/[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_PIECE_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """The stored body of a large message: the object's name, size (bytes), SHA-256, and the content type in it."""

    name: str
    size: int
    sha256: str
    content_type: str

    @classmethod
    def to(cls, name: str, content_type: str, body: bytes) -> Reference:
        """Return the reference to an object with this body."""
        return cls(name=name, size=len(body), sha256=hashlib.sha256(body).hexdigest(), content_type=content_type)

    @classmethod
    def parsed(cls, data: bytes) -> Reference:
        """Return the reference that `encoded` made. Raises ValueError."""
        try:
            found = cls(**json.loads(data))
            whole = isinstance(found.size, int) and isinstance(found.content_type, str)
            if whole and _NAME.fullmatch(found.name) and _DIGEST.fullmatch(found.sha256):
                return found
        except (TypeError, RecursionError) as error:
            raise ValueError(f"it is not a reference to a large body: {shown_text(error)}") from error
        raise ValueError("it is not a reference to a large body")

    def encoded(self) -> bytes:
        """Return the reference as the body of a message."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()


def unread_body(
    reference: Reference, open_object: Callable[[Reference], BinaryIO], decode: Callable[[str, bytes], Any]
) -> UnreadBody:
    """Return a large body before it is read from its storage. `decode` is `Codecs.decode`.

    Reads of the file of `open` raise UndecodableBody at its end if size or SHA-256 are wrong. `open` raises
    MissingBody. It raises HandlerNotStarted if the storage does not answer.
    """

    def open_body() -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(_Verified(open_object(reference), reference)))

    return UnreadBody(reference.content_type, open_body, decode)


class _Verified(io.RawIOBase):
    """A file that raises UndecodableBody at its end if it does not have the size and the SHA-256 of its reference."""

    def __init__(self, file: BinaryIO, reference: Reference) -> None:
        self._file = file
        self._reference = reference
        self._hash = hashlib.sha256()
        self._size = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        name = self._reference.name
        try:
            piece = self._file.read(min(len(buffer), _PIECE_BYTES))
        except OutboxError:
            raise
        except Exception as error:
            raise HandlerNotStarted(
                f"the object {name} of a large body cannot be read now: {error_line(error)}. The message waits."
            ) from error
        self._hash.update(piece)
        self._size += len(piece)
        if self._size > self._reference.size or (not piece and not self._is_whole()):
            raise UndecodableBody(
                f"the object {name} was changed after it was stored: it should have {self._reference.size:,} bytes "
                f"with the SHA-256 {self._reference.sha256}. Restore this version of the object, then replay the "
                "message."
            )
        buffer[: len(piece)] = piece
        return len(piece)

    def _is_whole(self) -> bool:
        return self._size == self._reference.size and self._hash.hexdigest() == self._reference.sha256

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
