"""Encodes bodies to bytes, and decodes bytes to bodies. Each content type has one codec.

The default is JSON; pickle is not used. A part of outbox may store a body in a form of its own, whose content type
begins with OWN_CONTENT_TYPES (see `outbox.hooks.add_body_form`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, BinaryIO, Final, Protocol
from uuid import UUID

from outbox.erased import ERASED, ERASED_CONTENT_TYPE, Erased
from outbox.errors import ConfigurationError, HandlerNotStarted, UndecodableBody, UnserialisableBody
from outbox.utils.safe_text import error_line, shown_text

OWN_CONTENT_TYPES: Final = "application/vnd.outbox."
# The message has a reference to its body, which is stored elsewhere. The codec also has a method `unread(data)`, which
# returns the UnreadBody without decoding it.
REFERENCE_CONTENT_TYPE: Final = f"{OWN_CONTENT_TYPES}large"

_raw_decode: Final = json.JSONDecoder().raw_decode


class Codec(Protocol):
    """Encodes and decodes the bodies of one content type."""

    @property
    def content_type(self) -> str:
        """The content type that is stored with every message that this codec encodes."""

    def encode(self, body: Any) -> bytes:
        """Encode `body`. Raises TypeError or ValueError if `body` cannot be encoded."""

    def decode(self, data: bytes) -> Any:
        """Decode `data`. Raises ValueError if the data is damaged."""


class UnreadBody:
    """A body that is read when it is first used. A codec may return one.

    `content_type` is that of the encoded body. `open` returns a binary file of the encoded body, which is read in
    pieces; the file raises the errors of the codec that made this object. `decode` is `Codecs.decode`.
    """

    def __init__(
        self, content_type: str, open_body: Callable[[], BinaryIO], decode: Callable[[str, bytes], Any]
    ) -> None:
        self.content_type = content_type
        self.open = open_body
        self._decode = decode

    def encoded(self) -> bytes:
        """Return the encoded body. Raises the errors of `open`."""
        with self.open() as file:
            return file.read()

    def read(self) -> Any:
        """Return the decoded body. Raises the errors of `open` and of `Codecs.decode`."""
        return self._decode(self.content_type, self.encoded())


class JsonCodec:
    """Compact UTF-8 JSON. Decimal, UUID, datetime, date, time and timedelta become strings (the last four in ISO 8601).

    These values stay strings after decoding, so that a consumer in another language sees the same message.
    """

    content_type = "application/json"

    def encode(self, body: Any) -> bytes:
        """Encode `body`. Raises ValueError for NaN and infinities, which JSON does not have."""
        try:
            return _encode(body).encode()
        except (TypeError, ValueError, RecursionError):
            raise
        except Exception as error:
            # The methods of a value in the body may raise any error.
            raise ValueError(f"a value raised {type(error).__name__}: {shown_text(error)}") from error

    def decode(self, data: bytes) -> Any:
        # The decoder is called directly, because json.loads also detects the encoding and skips white space at both
        # ends. For a small body, the direct call takes a third of the time that json.loads takes.
        try:
            text = data.decode()
            value, end = _raw_decode(text)
        except ValueError:
            return json.loads(data)
        return value if end == len(text) else json.loads(data)


class BytesCodec:
    """A codec for bodies that are already bytes."""

    content_type = "application/octet-stream"

    def encode(self, body: Any) -> bytes:
        if not isinstance(body, (bytes, bytearray, memoryview)):
            raise TypeError(f"expected bytes, got {type(body).__name__}")
        return bytes(body)

    def decode(self, data: bytes) -> Any:
        return data


class ErasedCodec:
    """Decodes the body of an erased message to ERASED."""

    content_type = ERASED_CONTENT_TYPE

    def encode(self, body: Any) -> bytes:
        raise TypeError("an application cannot publish an erased message")

    def decode(self, data: bytes) -> Erased:
        return ERASED


def _plain(value: object) -> str:
    if isinstance(value, (Decimal, UUID)):
        return str(value)
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, timedelta):
        return _duration(value)
    raise TypeError(f"{type(value).__name__} is not JSON: convert it, or declare a codec for the topic")


def _duration(value: timedelta) -> str:
    """Return the time span as text in ISO 8601, in the same form as django.utils.duration.

    The text has days, hours, minutes and seconds.
    """
    sign, value = ("-", -value) if value < timedelta(0) else ("", value)
    minutes, seconds = divmod(value.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    fraction = f".{value.microseconds:06}" if value.microseconds else ""
    return f"{sign}P{value.days}DT{hours:02}H{minutes:02}M{seconds:02}{fraction}S"


# All bodies use this one encoder, because json.dumps with these options would create an encoder for every body.
_encode: Final = json.JSONEncoder(default=_plain, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


class Codecs:
    """The codecs of an application: a default codec, and codecs that topics declare."""

    def __init__(self, default: Codec | None = None, *, by_topic: dict[str, Codec] | None = None) -> None:
        self._default: Codec = default or JsonCodec()
        self._by_topic = dict(by_topic or {})
        known: Iterable[Codec] = (JsonCodec(), BytesCodec(), ErasedCodec(), self._default, *self._by_topic.values())
        self._by_content_type = {codec.content_type: codec for codec in known}

    def add(self, codec: Codec) -> None:
        """Add a codec that only decodes, for one more content type."""
        self._by_content_type[codec.content_type] = codec

    def encode(self, topic: str, body: Any) -> tuple[bytes, str]:
        """Return the encoded body and its content type. Raises UnserialisableBody with the topic and the cause."""
        codec = self._by_topic.get(topic, self._default)
        try:
            encoded = codec.encode(body)
        except (TypeError, ValueError, RecursionError) as error:
            raise UnserialisableBody(
                f"the body for topic {topic!r} cannot be encoded as {codec.content_type}: {shown_text(error)}. "
                f"Nothing was published."
            ) from error
        if not isinstance(encoded, bytes):
            raise ConfigurationError(
                f"codec {type(codec).__name__} returned {type(encoded).__name__}; encode() must return bytes."
            )
        return encoded, codec.content_type

    def decode(self, content_type: str, data: bytes) -> Any:
        """Return the decoded body; ERASED if the message is erased, or the key of its subject is deleted.

        Raises UndecodableBody with the content type. Raises HandlerNotStarted if what the body needs, such as a key,
        cannot be read now.
        """
        codec = self._by_content_type.get(content_type)
        if codec is None and content_type.startswith(OWN_CONTENT_TYPES):
            raise HandlerNotStarted(
                f"the body has the content type {content_type!r}, in which a part of outbox stores bodies that this "
                "process does not have. The message waits. Add the part to INSTALLED_APPS, as the publisher does."
            )
        if codec is None:
            raise UndecodableBody(
                f"no codec for content type {content_type!r}: the message was published by an application with another "
                f"codec. Add that codec to this application's settings and replay the message."
            )
        try:
            return codec.decode(data)
        except (HandlerNotStarted, UndecodableBody):
            raise
        except ValueError as error:
            raise UndecodableBody(f"the body is not valid {content_type}: {shown_text(error)}") from error
        except Exception as error:
            # A codec of the application may raise any error. Every engine treats a body that a codec cannot decode like
            # a body for which there is no codec.
            raise UndecodableBody(f"the codec for {content_type!r} failed with {error_line(error)}") from error
