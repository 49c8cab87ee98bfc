"""A page's database access in transactions with a time limit, and the parsing of request parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final
from uuid import UUID

from django.db import router
from django.http import QueryDict
from django.utils import timezone

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.contrib.django.actions.declaration import Field, FieldKind, Values, parsed
from outbox.contrib.django.database import deadline
from outbox.contrib.django.database.aliases import broker_executor
from outbox.contrib.django.models import OperatorAction
from outbox.contrib.django.views import SECONDS
from outbox.errors import UsageError

# The time limit for a confirmed action. This limit is longer than the limit of a page, because the action makes the
# plan again and commits its changes.
ACTION_SECONDS: Final = 20.0

# Limits each statement to the rest of the deadline, and each wait for a lock to one second.
_BOUND: Final = Statement("""
SELECT set_config('statement_timeout', %(milliseconds)s, true), set_config('lock_timeout', '1s', true),
       set_config('transaction_read_only', 'on', true)
""")


@contextmanager
def reading() -> Iterator[Executor]:
    """A read-only transaction on the broker, within the deadline of the request.

    Raises BrokerUnavailable. After a time limit, its `__cause__` is psycopg's QueryCanceled or LockNotAvailable.
    """
    with broker_executor() as run:
        seconds = deadline.seconds_left() or SECONDS
        # The limits apply to this transaction only, so a pooler does not give them to the next client of the session.
        with run.connection.transaction():
            run.execute(_BOUND, {"milliseconds": str(round(seconds * 1000))})
            yield run


@contextmanager
def application() -> Iterator[None]:
    """A transaction on the application's database (accounts, findings, audit), within the deadline of the request."""
    with deadline.kept_by_application(router.db_for_write(OperatorAction)):
        yield


def text(given: Mapping[str, str], name: str) -> str | None:
    """The text of a parameter; None if it is empty or missing.

    Raises UsageError for a text that PostgreSQL cannot store.
    """
    value = given.get(name, "")
    if any(one == "\0" or "\ud800" <= one <= "\udfff" for one in value):
        raise UsageError(f"{name}: PostgreSQL cannot store a text with a NUL character or half a character; remove it.")
    return value or None


def value(given: Mapping[str, str], name: str, kind: FieldKind) -> Any:
    """The value of a parameter; None if it is empty or missing. Times may lack a zone. Raises UsageError."""
    found = text(given, name)
    try:
        return None if found is None else parsed(kind, found, zone=timezone.get_current_timezone())
    except ValueError as error:
        raise UsageError(f"{name}: {error}.") from None


def as_uuid(value: str) -> UUID | None:
    """Parse a text as an id; None if the text is not an id."""
    try:
        return UUID(value.strip())
    except ValueError:
        return None


def required(given: Mapping[str, str], name: str) -> str:
    """The text of a required parameter. Raises UsageError if it is missing."""
    value = text(given, name)
    if value is None:
        raise UsageError(f"{name} is missing: go back to the page that had the button.")
    return value


def values_of(fields: Sequence[Field], given: QueryDict) -> Values:
    """The values of the fields of an action or a listing, from a form. Raises UsageError."""
    return {field.name: _value(field, given) for field in fields}


def _value(field: Field, given: QueryDict) -> Any:
    if not field.on_page:
        return field.default if field.kind is not FieldKind.FLAG else False
    if field.kind is FieldKind.FLAG:
        return given.get(field.name) == "yes"
    if field.many:
        found = [value({field.name: one}, field.name, field.kind) for one in given.getlist(field.name)]
        return [one for one in found if one is not None]
    if field.required:
        required(given, field.name)
    one = value(given, field.name, field.kind)
    if field.choices and one not in (None, *field.choices):
        raise UsageError(f"{field.name}: {one!r} is none of {', '.join(field.choices)}.")
    return field.default if one is None else one
