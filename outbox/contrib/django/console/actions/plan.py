"""The structure of an action: first a plan shows the effect; a confirmation with a reason then runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.http import QueryDict


@dataclass(frozen=True, slots=True)
class Option:
    """An option that can be ticked when the action is confirmed."""

    name: str
    label: str
    help: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionPlan:
    """The effect of an action. It is made again from the same parameters when the action is confirmed.

    `subject`: the object of the action, as the audit names it. `effect`: the effect, in words. `caution`: an effect
    that cannot be undone, or that may go wrong. `before`: the present state. `do` runs the action and returns the state
    afterwards. `pinned`: parameters of this plan, so that the confirmed plan is the shown one. `nothing`: there is
    nothing to do.
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
    """One kind of action: its name in addresses and in the audit, its title, and how a form becomes a plan.

    Planning changes nothing. It raises UsageError for an impossible action.
    """

    name: str
    title: str
    plan: Callable[[QueryDict], ActionPlan]
