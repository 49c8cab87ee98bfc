"""Values that an application passes on from a form, a file or another clock to a publish call."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, Final

_TEXTS: Final = {
    "NUL": "a\x00b",
    "half a surrogate pair": "a\ud83d",
    "100 kB": "x" * 100_000,
    "right to left": "\u202e\u05d0\u200f\u0627",
    "lines": "a\r\nb\u2028c\n",
    "emoji": "\U0001f469\u200d\U0001f680\ufe0f",
    "quotes": "'\"\\%s{0}$1--",
}
_ODD_OFFSET: Final = timezone(timedelta(hours=5, minutes=45, seconds=30))
_TIMES: Final = {
    "year 1": datetime(1, 1, 1, tzinfo=UTC),
    "before year 1": datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14))),
    "the third day": datetime(1, 1, 3, tzinfo=UTC),
    "the last day": datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
    "after the last day": datetime(9999, 12, 31, 23, tzinfo=timezone(-timedelta(hours=12))),
    "no zone": datetime(2000, 1, 1),  # noqa: DTZ001 - as an application writes it
    "an odd offset": datetime(2000, 1, 1, tzinfo=_ODD_OFFSET),
}
_NUMBERS: Final = {
    "NaN": math.nan,
    "Infinity": -math.inf,
    "decimal NaN": Decimal("NaN"),
    "1e300": 1e300,
    "a long number": 10**400,
    "-0": -0.0,
}
# A key is the name of its row and message, too: the hostile text follows it.
KEY_END: Final = "|"

HOSTILE: Final[dict[str, dict[str, Any]]] = {
    **{f"key: {name}": {"key": value} for name, value in _TEXTS.items()},
    **{f"tag: {name}": {"tag": value} for name, value in _TEXTS.items()},
    **{f"header: {name}": {"headers": {"x": value}} for name, value in _TEXTS.items()},
    **{f"name of a header: {name}": {"headers": {value: "x"}} for name, value in _TEXTS.items()},
    **{f"body: {name}": {"body": {"x": value}} for name, value in (_TEXTS | _TIMES | _NUMBERS).items()},
    **{f"name in a body: {name}": {"body": {value: 1}} for name, value in _TEXTS.items()},
    "body: date": {"body": [date.min, date.max, timedelta.max]},
    **{f"time: {name}": {"deliver_at": value} for name, value in _TIMES.items()},
}
"""The options of a publish call, by what is hostile in them."""
