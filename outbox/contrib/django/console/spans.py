"""The spans of time that the diagrams and the timeline can show, and the resolution of each span's figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import urlencode

from django.http import HttpRequest

from outbox.contrib.django.console.asking import text


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """A span of time up to now. `name`: its name in the address; `label`: its name for people."""

    name: str
    label: str
    seconds: float


SPANS: Final = (
    TimeSpan("15m", "15 minutes", 900.0),
    TimeSpan("1h", "1 hour", 3600.0),
    TimeSpan("6h", "6 hours", 6 * 3600.0),
    TimeSpan("24h", "24 hours", 24 * 3600.0),
    TimeSpan("7d", "7 days", 7 * 24 * 3600.0),
)


def chosen_span(request: HttpRequest) -> TimeSpan:
    """The span that the parameter `span` names; without a known name, the shortest one."""
    wanted = text(request.GET, "span")
    return next((one for one in SPANS if one.name == wanted), SPANS[0])


def span_tabs(request: HttpRequest, chosen: TimeSpan) -> list[tuple[str, str, bool]]:
    """The label and the address of each span, and whether it is the chosen one. Other parameters stay as they are."""
    given = {name: value for name, value in request.GET.items() if name not in ("span", "after")}
    return [(one.label, "?" + urlencode({**given, "span": one.name}), one is chosen) for one in SPANS]
