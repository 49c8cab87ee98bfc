"""The values of tables, evidence, plans and audit entries as HTML for a page, and as text for a command.

A cell is a value or a list of values. Functions such as `badge` and `link` return HTML, of which a command prints the
text. Times are in Django's time zone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from html import unescape
from typing import Final
from urllib.parse import urlencode

from django.conf import settings
from django.urls import NoReverseMatch, reverse
from django.utils import timezone
from django.utils.html import conditional_escape, format_html, format_html_join, strip_tags
from django.utils.safestring import SafeString

from outbox.broker.operations.conditions import duration
from outbox.contrib.django.settings.conf import aware
from outbox.utils.safe_text import for_people
from outbox.utils.safe_text import inert as harmless

# A time with a zone, as PostgreSQL and Python write it.
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d(?::?\d\d)?)")
# The folders of a file of code, before its last folder, name and line: the files of several apps have equal names.
_FOLDERS: Final = re.compile(r"(?<![\w/])(?:/[\w.@+-]+)*/(?=[\w.@+-]+/[\w-]+\.py:\d+)")
_RETRY: Final = re.compile(r"%RETRY%([^\s,;:/]+)(?:/([^\s,;:]+))?")
# The HTML of a time.
_EXACT: Final = re.compile(r'<time datetime="([^"]+)"[^>]*>[^<]*</time>')
NOTHING: Final = "–"
_CODES: Final[Mapping[str, Mapping[object, str]]] = {"decision": {"C": "COMMIT", "R": "ROLLBACK"}}


# -- texts ----------------------------------------------------------------------------------------------


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
    """Return a time in Django's time zone, or in its own if Django's zone cannot express it, as in the first year.

    A time without a zone is in TIME_ZONE without USE_TZ, and else in UTC.
    """
    known = aware(at)
    known = known if known.tzinfo is not None else known.replace(tzinfo=UTC)
    try:
        return timezone.localtime(known)
    except (OverflowError, ValueError):
        return known


def second(at: datetime) -> str:
    """Return a time in Django's time zone as text, without fractions of a second."""
    return local(at).replace(tzinfo=None).isoformat(" ", "seconds")


def words(name: object) -> str:
    return str(name).replace("_", " ")


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


def inert(value: object) -> str:
    """Escape a key, tag or name that other programs have chosen, so that its control characters have no effect."""
    return "" if value is None else harmless(str(value))


def told(value: object) -> str:
    """Return all lines of an error, with passwords masked."""
    return "" if value is None else for_people(str(value))


def first_line(value: object) -> str:
    """Return the first line of an error, with passwords masked. With --json, a command prints the whole text."""
    lines = for_people(str(value or "")).splitlines()
    return lines[0] if lines else ""


def shortened(text: str, length: int) -> str:
    """Return at most `length` characters of a text. Django's truncatechars would translate the ellipsis."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def span(seconds: float | None) -> str:
    """Return a duration as a readable text. A duration under a second is in milliseconds."""
    if seconds is None:
        return NOTHING
    if abs(seconds) < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 10 else duration(seconds)


def amount(value: int | float | None) -> str:
    """Return a number with a space between groups of three digits."""
    return NOTHING if value is None else f"{value:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def figure(value: object) -> str:
    """Return a number as `amount` does, and any other value as text."""
    return amount(value) if isinstance(value, (int, float)) else str(value)


# -- HTML -----------------------------------------------------------------------------------------------


def moment(value: datetime | None) -> SafeString | str:
    """Return a time as HTML. Only the HTML title shows fractions of a second."""
    return NOTHING if value is None else _time(value, second(value))


def clock(value: datetime | None) -> SafeString | str:
    """Return the time of day as HTML. The HTML title shows the day."""
    return NOTHING if value is None else _time(value, f"{local(value):%H:%M:%S}")


def ago(value: datetime | None) -> SafeString | str:
    """Return the time since a past moment, or until a future moment, as HTML. The HTML title shows the moment."""
    if value is None:
        return NOTHING
    seconds = (datetime.now(UTC) - local(value)).total_seconds()
    return _time(value, f"{duration(seconds)} ago" if seconds >= 0 else f"in {duration(-seconds)}")


def _time(at: datetime, text: str) -> SafeString:
    exact = local(at).isoformat()
    return format_html('<time datetime="{}" title="{}">{}</time>', exact, exact, text)


def badge(text: object, tone: str = "plain") -> SafeString:
    """A word in a colour. `tone`: good, bad, warn or plain."""
    return format_html('<span class="badge {}">{}</span>', tone, inert(text))


def quiet(value: object) -> SafeString:
    """A value that is less important than the others of its cell."""
    return format_html('<span class="quiet">{}</span>', html(value))


def code(text: str) -> SafeString:
    return format_html("<code>{}</code>", inert(text))


def error(text: str | None, length: int = 160) -> str:
    """The first line of an error, up to a length."""
    return shortened(first_line(text), length)


def link(value: object, page: str, argument: object = None, *, style: str = "", **query: object) -> SafeString | str:
    """A value with a link to a page. A project that has not mounted the pages gets the value."""
    if not hasattr(settings, "ROOT_URLCONF"):
        return html(value)
    try:
        address = reverse(f"outbox:{page}", args=[] if argument is None else [argument])
    except NoReverseMatch:
        return html(value)
    address += f"?{urlencode(query)}" if query else ""
    of_style = format_html(' class="{}"', style) if style else ""
    return format_html('<a{} href="{}">{}</a>', of_style, address, html(value))


def group_link(name: str) -> SafeString | str:
    return link(name, "group", name=name)


def topic_link(name: str) -> SafeString | str:
    return link(name, "topic", name=name)


def message_link(message_id: object) -> SafeString | str:
    return link(message_id, "message", message_id, style="id")


def joined(values: Iterable[object], between: str = ", ", nothing: str = NOTHING) -> SafeString | str:
    """Values with a text between them; `nothing` if there are none."""
    return format_html_join(between, "{}", ((html(one),) for one in values)) or nothing


def html(value: object) -> SafeString | str:
    """A cell as HTML. Nothing (None, an empty text or an empty list) is a dash."""
    if isinstance(value, (list, tuple)):
        return joined((one for one in value if one not in (None, "")), " ")
    if isinstance(value, datetime):
        return moment(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return amount(value)
    return conditional_escape(value if isinstance(value, SafeString) else inert(value)) or NOTHING


def plain(value: object) -> str:
    """A cell as text, for the table of a command. A time is exact, with its zone. Nothing is a hyphen."""
    if isinstance(value, (list, tuple)):
        return " ".join(plain(one) for one in value if one not in (None, "")) or "-"
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="seconds")
    text = "" if value is None else str(value)
    if isinstance(value, SafeString):
        text = unescape(strip_tags(_EXACT.sub(lambda found: plain(datetime.fromisoformat(found[1])), text)))
    return "-" if text in ("", NOTHING) else text
