"""An operator action is declared once. From the declaration come a command's arguments, a page's form and the audit.

Planning changes nothing and says the effect in words. `ActionPlan.do` runs the action. A command shows the plan with
`--dry-run`; a page shows it before the operator confirms it with a reason.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

# The permission of an action that the operations page offers.
ACT: Final = "outbox.act"
# The key in `before` and `after` that lists what was asked for and is not done. A command then exits with 1.
LEFT: Final = "not_done"

Values = Mapping[str, Any]
"""The values of an action's fields by name: parsed, None where none was given, a list where several are allowed."""


class FieldKind(enum.Enum):
    """The kind of a field's value."""

    TEXT = enum.auto()
    ID = enum.auto()
    """A message or transaction id."""
    NUMBER = enum.auto()
    """A whole number, at least 0."""
    COUNT = enum.auto()
    """A whole number, at least 1."""
    SECONDS = enum.auto()
    """A number of seconds, at least 0."""
    TIME = enum.auto()
    """A time; without a zone it is refused by a command, and in Django's current zone on a page."""
    FLAG = enum.auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionField:
    """One field of an action: an argument of its command and an input of its form.

    `positional`: without an option's name on the command line. `many`: may be given several times. `one_of`: exactly
    one of the fields with the same text is given. `on_page`: the page has it. `with_confirmation`: the page asks for it
    together with the reason.
    """

    name: str
    help: str
    label: str = ""
    kind: FieldKind = FieldKind.TEXT
    required: bool = False
    positional: bool = False
    many: bool = False
    choices: Sequence[str] = ()
    default: Any = None
    one_of: str = ""
    on_page: bool = True
    with_confirmation: bool = False

    @property
    def title(self) -> str:
        """The label of its input."""
        return self.label or self.name.replace("_", " ").capitalize()


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionPlan:
    """The effect of an action with given values. The page makes it again when the action is confirmed.

    `subject`: the object of the action, as the audit names it. `effect`: the effect, in words. `caution`: an effect
    that cannot be undone, or that may go wrong. `dangerous`: a command asks for a confirmation. `before`: the present
    state. `do` runs the action and returns the state afterwards. `pinned`: values of this plan, so that the confirmed
    plan is the shown one. `nothing`: there is nothing to do. `refusal`: why `do` would be refused now; empty if it
    would not.
    """

    subject: str
    effect: str
    do: Callable[[], Mapping[str, Any]]
    before: Mapping[str, Any] = field(default_factory=dict)
    caution: str = ""
    dangerous: bool = False
    pinned: Mapping[str, str] = field(default_factory=dict)
    nothing: bool = False
    refusal: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeclaredAction:
    """One kind of action.

    `name` is the action in the audit and in the page's address. `command` is its command, as it is written in a shell.
    `permission` is needed on the page; None: the page does not offer it, and it takes a shell. `plan` raises UsageError
    for an impossible action.
    """

    name: str
    title: str
    command: str
    fields: Sequence[ActionField]
    plan: Callable[[Values], ActionPlan]
    permission: str | None = ACT

    @property
    def subcommand(self) -> str:
        """The word after the command's name; an option for a command without subcommands."""
        return self.command.partition(" ")[2]
