"""Template filters and tags of the operations page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import metadata
from typing import Any, Final
from uuid import UUID

from django import template
from django.template import Context, loader
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from outbox.contrib.console.asking import as_uuid
from outbox.contrib.django import catalogue
from outbox.contrib.django.actions import cells
from outbox.contrib.django.actions.declaration import Button
from outbox.contrib.django.actions.listing import PAGE, Choice, Column, Listing
from outbox.contrib.django.catalogue import ACTIONS, LISTINGS, has_buttons

register = template.Library()

_DOCUMENT: Final = re.compile(r"\bdocs/([\w/-]+\.md(?:#[\w-]+)?)")


for shown in (
    *(cells.inert, cells.told, cells.first_line, cells.shortened, cells.readable, cells.words, cells.span),
    *(cells.amount, cells.figure, cells.moment, cells.clock, cells.ago),
):
    register.filter(shown.__name__, shown)


@register.filter
def marked(text: str) -> SafeString:
    """Return a sentence as HTML, with the parts between backticks as <code>, and with links to the documents."""
    parts = enumerate(text.split("`"))
    return format_html_join(
        "", "{}", ((format_html("<code>{}</code>", part) if number % 2 else _linked(part),) for number, part in parts)
    )


@cache
def documents() -> str:
    """Return the address of the folder docs/ of this release; '' for a package that was not built for a release."""
    try:
        named = metadata.metadata("outbox-transactional").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return ""
    addresses: dict[str, str] = dict(one.split(", ", 1) for one in named)
    return addresses.get("Documentation", "").removesuffix("index.md")


def _linked(text: str) -> SafeString | str:
    return format_html_join("", "{}", ((part,) for part in _with_links(text, documents()))) if documents() else text


def _with_links(text: str, folder: str) -> Iterator[SafeString | str]:
    end = 0
    for found in _DOCUMENT.finditer(text):
        page, _, section = found[1].removesuffix(".md").partition(".md#")
        title = (section or page.rpartition("/")[2]).replace("-", " ")
        yield text[end : found.start()]
        yield format_html('<a href="{}{}">{}</a>', folder, found[1], title)
        end = found.end()
    yield text[end:]


@register.filter
def in_table(key: str, values: Mapping[str, object]) -> object:
    """The value of a key; None without it."""
    return values.get(key)


@register.filter
def as_id(text: str | None) -> UUID | None:
    """Return the id that a text holds; None if it holds none."""
    return as_uuid(text) if text else None


@register.simple_tag
def current_zone() -> str:
    """Return the name of Django's current time zone, in which the page shows all times."""
    return timezone.get_current_timezone_name()


@register.inclusion_tag("outbox/console/button.html", takes_context=True)
def button(context: Mapping[str, Any], one: Button) -> dict[str, Any]:
    """Show a button that leads to the confirmation page of an action, if the user may run actions."""
    return {
        **_with_token(context, one.action),
        "label": one.label,
        "tone": one.tone,
        # `_shown` renders outside of the page, whose `localize off` would leave 1234 as it is.
        "fields": {key: str(value) for key, value in one.fields.items() if value not in (None, "")},
    }


@register.simple_tag(takes_context=True)
def buttons(context: Context, place: str, subject: object = None) -> SafeString:
    """Show all buttons that actions declare for a place: of a row, or without `subject` of the page."""
    page: Any = context.flatten()
    found = catalogue.buttons(place, page if subject is None else subject)
    return format_html_join(" ", "{}", ((_shown(page, one),) for one in found))


@register.simple_tag
def selected_buttons(listing: Listing) -> list[Button | str]:
    """Return the buttons for the rows that the user ticks."""
    return list(catalogue.buttons(f"{listing.name} selected"))


def _shown(context: Mapping[str, Any], one: Button | str) -> str:
    return (
        loader.render_to_string("outbox/console/button.html", button(context, one)) if isinstance(one, Button) else one
    )


def _with_token(context: Mapping[str, Any], action: str) -> dict[str, Any]:
    given = {name: context.get(name, "") for name in ("may_act", "csrf_token", "here")}
    return {**given, "url": reverse(f"outbox:act_{action}")}


@register.inclusion_tag("outbox/console/action_form.html", takes_context=True)
def action_form(
    context: Mapping[str, Any],
    name: str,
    label: str,
    *,
    present: Mapping[str, str] | None = None,
    left_empty: Sequence[str] = (),
    **given: object,
) -> dict[str, Any]:
    """Show the form of an action. The form has an input for each declared field that is not `given` or `left_empty`.

    `present`: the present values of the fields. The confirmation page asks for its own fields and for the reason.
    """
    given |= dict.fromkeys(left_empty, "")
    fields = [
        (one, (present or {}).get(one.name, ""))
        for one in ACTIONS[name].fields
        if one.on_page and not one.with_confirmation and one.name not in given
    ]
    return {**_with_token(context, name), "label": label, "given": given, "fields": fields}


# -- tables ---------------------------------------------------------------------------------------------


@register.inclusion_tag("outbox/console/table.html", takes_context=True)
def table(context: dict[str, Any], listing: Listing | str, rows: Sequence[Any]) -> dict[str, Any]:
    """Show rows as the table of a declared listing, or of the listing with this name in the catalogue."""
    shown = LISTINGS[listing] if isinstance(listing, str) else listing
    given = {name: context.get(name) for name in ("may_act", "csrf_token", "here", "choice")}
    columns = shown.on(PAGE, context.get("asked") or {})
    return {**given, "listing": shown, "rows": rows, "columns": columns, "has_buttons": has_buttons(shown.name)}


@register.filter
def row_key(row: object, listing: Listing) -> str:
    """The attribute that identifies a row, so that a refresh keeps it in its place; '' if the listing has none."""
    return "" if listing.key is None else format_html(' data-key="{}"', cells.inert(listing.key(row)))


@register.simple_tag
def cell(column: Column, row: object) -> SafeString | str:
    """The content of a table's cell."""
    return cells.html(column.of(row))


@register.filter
def chosen_value(row: object, choice: Choice) -> object:
    """The value that a tick in this row sends; None if the row cannot be ticked."""
    return choice.value(row)
