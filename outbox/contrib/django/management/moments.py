"""Times as arguments of commands."""

from __future__ import annotations

from argparse import ArgumentTypeError
from datetime import datetime


def moment(text: str) -> datetime:
    """A time with its zone, in ISO 8601."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is no time: write it like 2026-01-31T12:00:00+00:00.") from error
    if found.tzinfo is None:
        raise ArgumentTypeError(f"{text!r} has no time zone: add +00:00 or your offset.")
    return found
