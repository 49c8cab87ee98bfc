"""Template filters and tags of the operations page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from django import template
from django.template import loader
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from outbox.contrib.console.asking import as_uuid
from outbox.contrib.django.actions import cells
from outbox.contrib.django.actions.listing import PAGE, Button, Choice, Column, Listing
from outbox.contrib.django.catalogue import ACTIONS, LISTINGS

register = template.Library()


for shown in (
    *(cells.inert, cells.told, cells.first_line, cells.shortened, cells.readable, cells.words, cells.span),
    *(cells.amount, cells.figure, cells.moment, cells.clock, cells.ago),
):
    register.filter(shown.__name__, shown)


@register.filter
def marked(text: str) -> SafeString:
    """Return a sentence as HTML, with the parts between backticks as <code>."""
    parts = enumerate(text.split("`"))
    return format_html_join(
        "", "{}", ((format_html("<code>{}</code>", part) if number % 2 else part,) for number, part in parts)
    )


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
def act(context: dict[str, Any], name: str, label: str, tone: str = "plain", **fields: object) -> dict[str, Any]:
    """Show a button that leads to the confirmation page of an action.

    If the user may not run actions, there is no button.
    """
    return {
        "may_act": context.get("may_act"),
        "csrf_token": context.get("csrf_token"),
        "here": context.get("here", ""),
        "url": reverse(f"outbox:act_{name}"),
        "label": label,
        "tone": tone,
        "fields": {key: value for key, value in fields.items() if value not in (None, "")},
    }


@register.inclusion_tag("outbox/console/button.html", takes_context=True)
def remedy(context: dict[str, Any], offered: Button) -> dict[str, Any]:
    """Show the button of a remedy, as `act` does."""
    return act(context, offered.action, offered.label, offered.tone, **offered.fields)


@register.inclusion_tag("outbox/console/action_form.html", takes_context=True)
def action_form(
    context: dict[str, Any], name: str, label: str, *, present: Mapping[str, str] | None = None, **given: object
) -> dict[str, Any]:
    """Show the form of an action. The form has an input for each declared field that is not in `given`.

    `present`: the present values of the fields. This form has no fields that are declared for the confirmation page.
    The confirmation page asks for these fields and for the reason.
    """
    fields = [
        (one, (present or {}).get(one.name, ""))
        for one in ACTIONS[name].fields
        if one.on_page and not one.with_confirmation and one.name not in given
    ]
    return {**act(context, name, label), "given": given, "fields": fields}


# -- tables ---------------------------------------------------------------------------------------------


@register.inclusion_tag("outbox/console/table.html", takes_context=True)
def table(context: dict[str, Any], listing: Listing | str, rows: Sequence[Any]) -> dict[str, Any]:
    """Show rows as the table of a declared listing, or of the listing with this name in the catalogue."""
    shown = LISTINGS[listing] if isinstance(listing, str) else listing
    given = {name: context.get(name) for name in ("may_act", "csrf_token", "here", "choice")}
    return {**given, "listing": shown, "rows": rows, "columns": context.get("columns") or shown.on(PAGE, {})}


@register.filter
def row_key(row: object, listing: Listing) -> str:
    """The attribute that identifies a row, so that a refresh keeps it in its place; '' if the listing has none."""
    return "" if listing.key is None else format_html(' data-key="{}"', cells.inert(listing.key(row)))


@register.simple_tag(takes_context=True)
def cell(context: dict[str, Any], column: Column, row: object) -> SafeString | str:
    """The content of a table's cell, with the buttons that the user may press."""
    found = column.of(row)
    if column.style != "actions":
        return cells.html(found)
    parts = [_button(context, one) if isinstance(one, Button) else one
             for one in (found if isinstance(found, list) else [found]) if one]  # fmt: skip
    return format_html_join(" ", "{}", ((one,) for one in parts if one))


def _button(context: dict[str, Any], one: Button) -> SafeString:
    shown = act(context, one.action, one.label, one.tone, **one.fields)
    return loader.render_to_string("outbox/console/button.html", shown)


@register.filter
def chosen_value(row: object, choice: Choice) -> object:
    """The value that a tick in this row sends; None if the row cannot be ticked."""
    return choice.value(row)
