"""Renders an operations page, or only its live part, for the current user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlencode

from django.db import Error as DatabaseError
from django.http import HttpRequest, HttpResponse
from django.template import loader
from django.urls import reverse

from outbox.broker.database.executor import Row
from outbox.contrib.console.asking import value
from outbox.contrib.console.signs import CHECK_SECONDS, Signs, read_signs
from outbox.contrib.django.actions.declaration import ACT, FieldKind
from outbox.contrib.django.catalogue import LISTINGS
from outbox.contrib.django.views import SEE, may

BODIES: Final = "outbox.view_bodies"

PER_PAGE: Final = 50
# The interval at which an open page reloads its live part.
REFRESH_SECONDS: float = 5

# The menu by what an operator wants: sections with the URL name and the title of each page. A listing of a part names
# its section and its title itself (`Listing.menu`), so an entry is there only if the part is installed.
_MENU: Final[Mapping[str, Sequence[tuple[str, str]]]] = {
    "Now": (("overview", "Overview"), ("workers", "Workers")),
    "Messages": (("search", "Messages"), ("waiting", "Waiting")),
    "Groups": (("groups", "Groups"), ("topics", "Topics")),
    "Repair": (("dead_letters", "Dead letters"), ("undecided", "Undecided"), ("incidents", "Incidents")),
    "History": (("audit", "Audit"),),
}
MENU: Final[Mapping[str, Sequence[tuple[str, str]]]] = {
    section: (*pages, *((one.name, one.menu[1]) for one in LISTINGS.values() if one.menu and one.menu[0] == section))
    for section, pages in _MENU.items()
}


def menu(path: str) -> list[Row]:
    """Return the sections of the menu, each with its pages, as the page at `path` shows them.

    `current`: the value of aria-current, "page" for the shown page and "true" for a section or list that it belongs to.
    """
    found = []
    for label, named in MENU.items():
        pages = [_entry(path, name, title) for name, title in named]
        current = "true" if any(one.current for one in pages) else ""
        # A section leads to its first page.
        found.append(Row(label=label, address=pages[0].address, current=current, pages=pages))
    return found


def _entry(path: str, name: str, title: str) -> Row:
    address = reverse(f"outbox:{name}")
    # The overview's address begins all others.
    current = "page" if path == address else "true" if name != "overview" and path.startswith(address) else ""
    return Row(label=title, address=address, current=current)


def paged(request: HttpRequest, rows: Sequence[Any], place: Callable[[Any], Mapping[str, object]]) -> Row:
    """The page for `rows` that were read with the limit PER_PAGE + 1. `place`: the parameters of the page after one.

    `more` is the query string of the next page, or '' on the last one.
    """
    shown = rows[:PER_PAGE]
    more = ""
    if len(rows) > PER_PAGE:
        following = {name: str(value) for name, value in place(shown[-1]).items()}
        more = urlencode({**request.GET.dict(), **following})
    return Row(rows=shown, more=more, is_first="after" not in request.GET)


def sliced(request: HttpRequest, rows: Sequence[Any]) -> Row:
    """One page of a list that is completely in memory."""
    begin = value(request.GET, "after", FieldKind.NUMBER) or 0
    return paged(request, rows[begin : begin + PER_PAGE + 1], lambda _: {"after": begin + PER_PAGE})


def render(request: HttpRequest, name: str, context: Mapping[str, Any], *, status: int = 200) -> HttpResponse:
    """Render a page by the name of its template. A request of console.js gets only the live part.

    Every page says if no process leads; a view that shows this itself gives `broker_notice`. `signs`: the signs that
    the view has read already.
    """
    is_part = request.headers.get("Outbox-Part") == "true"
    signs = context.get("signs") or (read_signs() if status < 500 else Signs())
    values = {
        "base": f"outbox/console/{'part' if is_part else 'base'}.html",
        **_permitted(request, is_part),
        "refresh_seconds": REFRESH_SECONDS,
        "check_seconds": CHECK_SECONDS,
        "path": request.path,
        "here": request.get_full_path(),
        "broker_notice": signs.notice,
        "state_of_broker": signs.state,
        **context,
    }
    text = loader.render_to_string(f"outbox/console/{name}.html", values, request)
    # The pages are in English, whatever LocaleMiddleware chooses.
    return HttpResponse(text, status=status, headers={"Content-Language": "en"})


def _permitted(request: HttpRequest, is_part: bool) -> dict[str, Any]:
    try:
        may_see, may_act, may_see_bodies = (may(request, permission) for permission in (SEE, ACT, BODIES))
    except DatabaseError:
        # If the accounts cannot be read, the error page must still be rendered.
        may_see = may_act = may_see_bodies = False
    sections = menu(request.path) if may_see and not is_part else []
    return {"menu": sections, "may_act": may_act, "may_see_bodies": may_see_bodies}


def problem(request: HttpRequest, title: str, text: str, *, status: int) -> HttpResponse:
    """Render an error page: what failed, and what to do."""
    return render(request, "problem", {"title": title, "text": text}, status=status)
