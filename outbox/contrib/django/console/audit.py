"""The audit: an action is recorded before it runs, and the record is completed afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder
from django.utils import timezone

from outbox.contrib.django.console.asking import application
from outbox.contrib.django.models import OperatorAction
from outbox.errors import OutboxError
from outbox.utils.safe_text import for_people


def recorded(
    who: str, why: str, action: str, *, subject: str, effect: str, before: Mapping[str, Any],
    do: Callable[[], Mapping[str, Any]],
) -> OperatorAction:  # fmt: skip
    """Record the intention, run the action, record the outcome; returns the entry.

    An OutboxError of `do` is recorded as an outcome. Every other error is recorded and raised.
    """
    with application():
        entry = OperatorAction.objects.create(
            who=_storable(who)[:255], why=_storable(why), action=action, subject=_storable(subject),
            effect=_storable(effect), before=_plain(before),
        )  # fmt: skip
    try:
        after, outcome = do(), OperatorAction.Outcome.DONE
    except OutboxError as error:
        after, outcome = {"error": for_people(str(error))}, OperatorAction.Outcome.FAILED
    except Exception as error:
        _end(entry, OperatorAction.Outcome.FAILED, {"error": for_people(f"{type(error).__name__}: {error}")})
        raise
    _end(entry, outcome, after)
    return entry


def _end(entry: OperatorAction, outcome: str, after: Mapping[str, Any]) -> None:
    entry.outcome, entry.after, entry.ended_at = outcome, _plain(after), timezone.now()
    with application():
        entry.save(update_fields=["outcome", "after", "ended_at"])


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The value without what PostgreSQL's JSON cannot store."""
    text = json.dumps(values, cls=DjangoJSONEncoder)
    plain: dict[str, Any] = json.loads(text.replace("\\u0000", "\\ufffd"))
    return plain


def _storable(text: str) -> str:
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")
