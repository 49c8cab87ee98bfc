"""Shared helpers that use the broker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

from outbox.broker.database.connection import Connection
from outbox.broker.leading import Sequencer
from outbox.contrib.django.database.aliases import broker_database
from outbox.contrib.django.engine.broker import flush
from outbox.utils import faults
from tests.django.sessions import in_session


def sequence() -> None:
    """Queue everything that is decided."""
    flush(within_seconds=5)
    in_session(_sequence)


def _sequence(connection: Connection) -> None:
    sequencer = Sequencer(broker_database(), uuid4())
    while sequencer.run_once(connection).appended:
        pass


@contextmanager
def end_messages_lost() -> Iterator[None]:
    """Every publish call of the block reports no end to the broker: only check-back can decide."""
    faults.arm("producer.before_end=raise")
    try:
        yield
        flush(within_seconds=5)
    finally:
        faults.arm("")
