"""The values of evidence, plans and audit entries as text for people: short times and paths, and no Python values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Final

from django.utils import timezone

# A time with a zone, as PostgreSQL and Python write it.
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d(?::?\d\d)?)")
# The folders of a source file, before its name and line.
_FOLDERS: Final = re.compile(r"(?<![\w/])(?:/[\w.@+-]+)+/(?=[\w-]+\.py:\d+)")
_RETRY: Final = re.compile(r"%RETRY%([^\s,;:/]+)(?:/([^\s,;:]+))?")
NOTHING: Final = "–"


_CODES: Final[Mapping[str, Mapping[object, str]]] = {"decision": {"C": "COMMIT", "R": "ROLLBACK"}}


def readable(value: object, name: str = "") -> str:
    """Return a value as one line of text. Nothing (None, an empty text or an empty list) is a dash.

    `name`: the name of the field; the codes of some fields are shown as words.
    """
    if isinstance(value, str) and value in _CODES.get(name, {}):
        return _CODES[name][value]
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return second(value)
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{words(str(key))} {readable(one, str(key))}" for key, one in value.items()) or NOTHING
    if not isinstance(value, str) and isinstance(value, Iterable):
        return ", ".join(map(readable, value)) or NOTHING
    return NOTHING if value in (None, "") else _RETRY.sub(_retries, _TIME.sub(_moment, _FOLDERS.sub("", str(value))))


def local(at: datetime) -> datetime:
    """Return a time in Django's time zone. A time without a zone is in UTC.

    A time that Django's zone cannot express, within a day of the first or last year, stays in its own zone.
    """
    aware = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    try:
        return timezone.localtime(aware)
    except (OverflowError, ValueError):
        return aware


def second(at: datetime) -> str:
    """Return a time in Django's time zone as text, without fractions of a second."""
    return local(at).replace(tzinfo=None).isoformat(" ", "seconds")


def words(name: str) -> str:
    """Return the name of a field as words."""
    return name.replace("_", " ")


def retried_topic(topic: str) -> str:
    """Return the topic whose retries a retry queue holds; any other topic is returned as it is."""
    found = _RETRY.fullmatch(topic)
    return found[2] if found and found[2] else topic


def _retries(found: re.Match[str]) -> str:
    return f"retries of {found[2] or found[1]}"


def _moment(found: re.Match[str]) -> str:
    try:
        return readable(datetime.fromisoformat(found[0]))
    except ValueError:
        return found[0]
