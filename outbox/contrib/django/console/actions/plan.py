"""What an action is: first a plan, which says what will happen, and with a reason that it is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.http import QueryDict


@dataclass(frozen=True, slots=True)
class Option:
    """Something that may be ticked where the action is confirmed."""

    name: str
    label: str
    help: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionPlan:
    """What would be done. Made anew, from the same parameters, when it is confirmed.

    `subject`: what it is about, as the audit names it. `effect`: what will happen, in words. `caution`: what cannot be
    undone, or else goes wrong. `before`: what is so now; `do` does it and returns what is so afterwards. `pinned`:
    parameters that belong to this plan, so that what is confirmed is what was shown. `nothing`: there is nothing to do.
    """

    subject: str
    effect: str
    do: Callable[[], Mapping[str, Any]]
    before: Mapping[str, Any] = field(default_factory=dict)
    caution: str = ""
    options: Sequence[Option] = ()
    pinned: Mapping[str, str] = field(default_factory=dict)
    nothing: bool = False


@dataclass(frozen=True, slots=True)
class PageAction:
    """One kind of action: its name in addresses and in the audit, a title, and how it is planned from a form.

    Planning changes nothing; it raises UsageError for what cannot be done.
    """

    name: str
    title: str
    plan: Callable[[QueryDict], ActionPlan]
