"""Template filters and tags of the operations page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from django import template
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from outbox.broker.operations.conditions import duration
from outbox.contrib.django.actions.catalogue import ACTIONS
from outbox.contrib.django.console import readable as texts
from outbox.contrib.django.console.asking import FilledForm
from outbox.contrib.django.console.cards import Remedy
from outbox.utils.safe_text import for_people
from outbox.utils.safe_text import inert as harmless

register = template.Library()


@register.filter
def inert(value: object) -> str:
    """Escape a key, tag or name that other programs have chosen, so that its control characters have no effect."""
    return "" if value is None else harmless(str(value))


@register.filter
def told(value: object) -> str:
    """Return all lines of an error, with passwords masked."""
    return "" if value is None else for_people(str(value))


@register.filter
def first_line(value: object) -> str:
    """Return the first line of an error, with passwords masked."""
    lines = for_people(str(value or "")).splitlines()
    return lines[0] if lines else ""


@register.filter
def shortened(text: str, length: int) -> str:
    """Return at most `length` characters of a text. Django's truncatechars would translate the ellipsis."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


@register.filter
def marked(text: str) -> SafeString:
    """Return a sentence as HTML, with the parts between backticks as <code>."""
    return format_html_join(
        "", "{}", ((format_html("<code>{}</code>", part) if odd else part,) for odd, part in _alternating(text))
    )


def _alternating(text: str) -> Iterator[tuple[bool, str]]:
    yield from ((bool(number % 2), part) for number, part in enumerate(text.split("`")))


@register.filter
def readable(value: object, name: str = "") -> str:
    """Return a value of a plan or of an audit entry as text. `name`: the name of its field."""
    return texts.readable(value, name)


@register.filter
def words(name: object) -> str:
    """Return the name of a field as words."""
    return texts.words(str(name))


@register.filter
def span(seconds: float | None) -> str:
    """Return a duration as a readable text. A duration under a second is in milliseconds."""
    if seconds is None:
        return "–"
    if abs(seconds) < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 10 else duration(seconds)


@register.filter
def amount(value: int | float | None) -> str:
    """Return a number with a space between groups of three digits."""
    return "–" if value is None else f"{value:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


@register.filter
def figure(value: object) -> str:
    """Return a number as `amount` does, and any other value as text."""
    return amount(value) if isinstance(value, (int, float)) else str(value)


@register.filter
def add_since(seconds: float, at: datetime) -> float:
    """Return seconds that were counted at a past moment, plus the seconds since that moment."""
    return seconds + max(0.0, (datetime.now(UTC) - at).total_seconds())


@register.simple_tag
def current_zone() -> str:
    """Return the name of Django's current time zone, in which the page shows all times."""
    return timezone.get_current_timezone_name()


@register.filter
def moment(value: datetime | None) -> SafeString | str:
    """Return a time as HTML, in Django's time zone. Only the HTML title shows fractions of a second."""
    if value is None:
        return "–"
    local = texts.local(value)
    return format_html(
        '<time datetime="{}" title="{}">{}</time>', local.isoformat(), local.isoformat(), texts.second(value)
    )


@register.filter
def clock(value: datetime | None) -> SafeString | str:
    """Return the time of day in Django's time zone as HTML. The HTML title shows the day."""
    if value is None:
        return "–"
    local = texts.local(value)
    return format_html(
        '<time datetime="{}" title="{}">{}</time>', local.isoformat(), local.isoformat(), f"{local:%H:%M:%S}"
    )


@register.filter
def ago(value: datetime | None) -> SafeString | str:
    """Return the time since a past moment, or until a future moment. The HTML title shows the moment."""
    if value is None:
        return "–"
    local = texts.local(value)
    seconds = (datetime.now(UTC) - local).total_seconds()
    text = f"{duration(seconds)} ago" if seconds >= 0 else f"in {duration(-seconds)}"
    return format_html('<time datetime="{}" title="{}">{}</time>', local.isoformat(), local, text)


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
def remedy(context: dict[str, Any], offered: Remedy) -> dict[str, Any]:
    """Show the button of a remedy, as `act` does."""
    return act(context, offered.action, offered.label, offered.tone, **offered.fields)


@register.inclusion_tag("outbox/console/action_form.html", takes_context=True)
def action_form(
    context: dict[str, Any],
    name: str,
    label: str,
    *,
    present: Mapping[str, str] | None = None,
    filled: FilledForm | None = None,
    **given: object,
) -> dict[str, Any]:
    """Show the form of an action. The form has an input for each declared field that is not in `given`.

    `present`: the present values of the fields. `filled`: the same form with the values that the operator has entered.
    This form has no fields that are declared for the confirmation page. The confirmation page asks for these fields and
    for the reason.
    """
    filled = filled or FilledForm(name, {key: str(value) for key, value in given.items()}, {}, present or {})
    fields = [
        (one, filled.entered.get(one.name, ""), filled.present.get(one.name, ""))
        for one in ACTIONS[name].fields
        if one.on_page and not one.with_confirmation and one.name not in filled.fixed
    ]
    shown = {**act(context, name, label), "given": filled.fixed, "fields": fields}
    return shown | ({"here": filled.back} if filled.back else {})


@register.inclusion_tag("outbox/console/action_form.html", takes_context=True)
def filled_form(context: dict[str, Any], form: FilledForm) -> dict[str, Any]:
    """Show the form of an action again, with the values that the operator has entered."""
    return action_form(context, form.name, "Show the plan …", filled=form)
