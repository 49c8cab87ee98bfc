"""The time limit of a message: the time after which no attempt to deliver the message begins.

The limit counts from the time at which the message is due: the time at which the broker has stored the message, or the
message's delivery time if that is later. The message carries its limit as a header, so that the limit goes wherever the
message goes.

See decision 207.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final

# The header with the limit: seconds as a decimal number with up to six decimal places.
TIMEOUT_HEADER: Final = "outbox-timeout"
# Both Python and PostgreSQL read the header with this pattern. A header of another form is no limit.
TIMEOUT_PATTERN: Final = r"^[0-9]{1,9}(\.[0-9]{1,6})?$"

_MICROSECOND: Final = timedelta(microseconds=1)
_LONGEST: Final = timedelta(seconds=999_999_999)
_FORM: Final = re.compile(TIMEOUT_PATTERN.replace("$", r"\Z"))


def timeout_text(timeout: timedelta) -> str:
    """Return the value of the header for a limit. Raises ValueError if the limit is not positive, or over 31 years."""
    if not timedelta(0) < timeout <= _LONGEST:
        raise ValueError("a time limit must be longer than 0 and at most 999,999,999 seconds")
    seconds, microseconds = divmod(timeout // _MICROSECOND, 1_000_000)
    return f"{seconds}.{microseconds:06d}".rstrip("0").rstrip(".")


def timeout_of(headers: Mapping[str, str]) -> timedelta | None:
    """Return the limit in the headers of a message; None if there is no limit."""
    text = headers.get(TIMEOUT_HEADER)
    if text is None or _FORM.match(text) is None:
        return None
    seconds, _, decimals = text.partition(".")
    return timedelta(seconds=int(seconds), microseconds=int(decimals.ljust(6, "0") or 0))


def ends_at(headers: Mapping[str, str], stored_at: datetime, deliver_at: datetime | None) -> datetime | None:
    """Return the time from which no attempt may begin; None if the message has no limit."""
    if TIMEOUT_HEADER not in headers:
        return None
    timeout = timeout_of(headers)
    return None if timeout is None else max(stored_at, deliver_at or stored_at) + timeout
