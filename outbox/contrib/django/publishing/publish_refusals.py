"""The refusals of `publish` before anything is stored: messages without their transaction, and leaks from tests."""

from __future__ import annotations

from typing import Final

from django.db import connections

from outbox.contrib.django.database.transactions import in_test_case
from outbox.contrib.django.settings.conf import OutboxSettings
from outbox.errors import TransactionUsageError, UsageError
from outbox.message import Message

_MAX_IMMUNITY_SECONDS: Final = 366 * 24 * 3600


def check_immunity(topic: str, immunity_seconds: object) -> None:
    """Raise UsageError unless it is None or a number of seconds that the broker can store."""
    if immunity_seconds is None or (type(immunity_seconds) is int and 0 <= immunity_seconds <= _MAX_IMMUNITY_SECONDS):
        return
    raise UsageError(
        f"topic {topic!r}: immunity_seconds must be a whole number of seconds, 0 to {_MAX_IMMUNITY_SECONDS} (a year), "
        f"not {immunity_seconds!r}."
    )


def refuse_without_transaction(settings: OutboxSettings, first: Message, immunity_seconds: int | None) -> None:
    """With no open transaction, raise TransactionUsageError if one is required, or if an option needs one."""
    if immunity_seconds is not None:
        raise TransactionUsageError(
            f"immunity_seconds={immunity_seconds} for topic {first.topic!r} applies to a transaction, and none is "
            "open: put the write and the publish call into `with transaction.atomic():`, or leave it out."
        )
    if settings.require_transaction:
        raise TransactionUsageError(
            f"OUTBOX['REQUIRE_TRANSACTION'] is on and no transaction is open: the message for topic {first.topic!r} "
            "would be sent even if its rows roll back. Put the write and the publish call into `with "
            "transaction.atomic():`, or use @transactional_message."
        )


def refuse_leak_from_test(settings: OutboxSettings, using: str | None) -> None:
    """Raise TransactionUsageError for a message that would leave a TestCase."""
    if settings.in_memory:
        return
    opened = [connections[using]] if using else connections.all(initialized_only=True)
    if any(in_test_case(connection) for connection in opened):
        raise leak_from_test("a message")


def leak_from_test(what: str) -> TransactionUsageError:
    """The error for a message that would leave a TestCase."""
    return TransactionUsageError(
        f"{what} would leave this TestCase: its transaction is always rolled back, the broker's database is not. Set "
        f"OUTBOX['IN_MEMORY'] = True for tests (OutboxTestMixin of outbox.contrib.django.testing does), or use "
        f"TransactionTestCase."
    )
