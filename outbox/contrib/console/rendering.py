"""Renders an operations page, or only its live part, for the current user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar
from urllib.parse import urlencode

from django.db import Error as DatabaseError
from django.http import HttpRequest, HttpResponse
from django.template import loader
from django.urls import reverse

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

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class MenuEntry:
    """A page of the menu, or a section with its pages. A section leads to its first page.

    `current`: the value of aria-current, "page" for the shown page and "true" for a section or list that it belongs to.
    """

    label: str
    address: str
    current: str = ""
    pages: Sequence[MenuEntry] = ()


def menu(path: str) -> list[MenuEntry]:
    """Return the sections of the menu, as the page at `path` shows them."""
    found = []
    for label, pages in MENU.items():
        shown = [_entry(path, name, title) for name, title in pages]
        found.append(MenuEntry(label, shown[0].address, "true" if any(one.current for one in shown) else "", shown))
    return found


def _entry(path: str, name: str, title: str) -> MenuEntry:
    address = reverse(f"outbox:{name}")
    if path == address:
        return MenuEntry(title, address, "page")
    # The overview's address begins all others.
    return MenuEntry(title, address, "true" if name != "overview" and path.startswith(address) else "")


@dataclass(frozen=True, slots=True)
class Page(Generic[Row]):
    """The rows of one page, and the query strings of the first and the next page. `more` is '' on the last page."""

    rows: Sequence[Row]
    first: str
    more: str
    is_first: bool


def paged(request: HttpRequest, rows: Sequence[Row], place: Callable[[Row], Mapping[str, object]]) -> Page[Row]:
    """The page for rows that were read with the limit PER_PAGE + 1.

    `place` returns the URL parameters of the page that begins after a given row. Rows with the same place stay on one
    page, because the next page begins after all of them.
    """
    if len(rows) <= PER_PAGE:
        return _page(request, rows, {})
    cut = PER_PAGE
    while cut and place(rows[cut]) == place(rows[cut - 1]):
        cut -= 1
    shown = rows[: cut or len(rows)]
    return _page(request, shown, place(shown[-1]))


def sliced(request: HttpRequest, rows: Sequence[Row]) -> Page[Row]:
    """One page of a list that is completely in memory."""
    begin = value(request.GET, "after", FieldKind.NUMBER) or 0
    end = begin + PER_PAGE
    return _page(request, rows[begin:end], {"after": end} if len(rows) > end else {})


def _page(request: HttpRequest, rows: Sequence[Row], following: Mapping[str, object]) -> Page[Row]:
    kept = {name: value for name, value in request.GET.items() if name != "after"}
    more = urlencode({**kept, **following}) if following else ""
    return Page(rows, urlencode(kept), more, "after" not in request.GET)


def render(request: HttpRequest, name: str, context: Mapping[str, Any], *, status: int = 200) -> HttpResponse:
    """Render a page by the name of its template. A request of console.js gets only the live part.

    Every page says if no process leads, because its figures then look healthy and are old. A view that shows this
    itself gives `broker_notice`. `signs`: the signs that the view has read already.
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
