"""Operator actions. Each action is declared once; its command, its buttons and forms and its audit use the declaration.

    @action(
        "pause",
        "Pause a group",
        "outbox_group pause",
        GROUP,
        buttons={"groups": lambda row: [Button("Pause …", fields={"group": row.name})]},
    )
    def _pause(values: Values) -> ActionPlan: ...

The function plans the action: it changes nothing, describes the effect in words, and raises UsageError for an
impossible action. `ActionPlan.do` runs the action. With `--dry-run`, a command only shows the plan. The operations page
shows the plan, and the operator then confirms the plan with a reason.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime, tzinfo
from typing import Any, Final
from uuid import UUID

from django.utils.timezone import make_aware

from outbox import names
from outbox.broker.database.executor import Executor
from outbox.broker.operations.dead_letters import PagePosition

# The permission that a user needs to run actions on the operations page.
ACT: Final = "outbox.act"
# A key in `before` and `after`. Its value lists the requested messages that the action did not change. If the key is
# present, the command exits with 1.
LEFT: Final = "not_done"

Values = Mapping[str, Any]
"""The parsed values of the fields of an action or a listing, by name.

A field that was not given has its default. A field that allows several values has a list.
"""


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: "1 message", "2 messages"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


class FieldKind(enum.Enum):
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
    """A time. A command refuses a time without a zone; the page reads such a time in Django's current zone."""
    PLACE = enum.auto()
    """A position in a list that is ordered by time."""
    FLAG = enum.auto()


# Python refuses to read thousands of digits, and PostgreSQL larger numbers.
_DIGITS: Final = len(str(2**63))


def parsed(kind: FieldKind, text: str, *, zone: tzinfo | None = None) -> Any:
    """The value that a text means in a field of this kind. Raises ValueError, whose text says what is wrong.

    `zone`: the zone of a time without one; if None, such a time is refused.
    """
    match kind:
        case FieldKind.ID:
            with refusing(f"{text!r} is not a message or transaction id"):
                return UUID(text.strip())
        case FieldKind.NUMBER | FieldKind.COUNT:
            least = int(kind is FieldKind.COUNT)
            if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS) or not least <= int(text) < 2**63:
                raise ValueError(f"{text!r} is not a whole number, at least {least}")
            return int(text)
        case FieldKind.SECONDS:
            with refusing(f"{text!r} is not a number of seconds, at least 0 and at most {names.MAX_WAIT_SECONDS:,}"):
                if names.is_seconds(seconds := float(text)):
                    return seconds
                raise ValueError
        case FieldKind.TIME:
            with refusing(f"{text!r} is not a time: write it like 2026-01-31T08:00:00+00:00"):
                found = datetime.fromisoformat(text)
                found = found if found.tzinfo or zone is None else make_aware(found, zone)
            if found.tzinfo is None:
                raise ValueError(f"{text!r} has no time zone: write it like 2026-01-31T08:00:00+00:00")
            return found
        case FieldKind.PLACE:
            at, _, number = text.rpartition("/")
            with refusing(f"{text!r} is not a position: copy the value after --after from the end of a page"):
                return PagePosition(parsed(FieldKind.TIME, at, zone=zone), parsed(FieldKind.NUMBER, number))
    return text


@contextmanager
def refusing(said: str) -> Iterator[None]:
    """Raise ValueError with this text instead of the ValueError or OverflowError of the block."""
    try:
        yield
    except (ValueError, OverflowError):
        raise ValueError(said) from None


@dataclass(frozen=True, slots=True)
class Field:
    """One field of an action or a listing: an argument of its command and an input of its form.

    `positional`: on the command line, the value has no option name. `many`: the field may have several values.
    `example`: a value that the input of the form shows. `one_of`: the operator gives exactly one of the fields with the
    same text. `on_page`: the page shows the field. `with_confirmation`: the page asks for the field together with the
    reason. `by_tab`: the tabs of a page choose the value, and its form passes the value on.
    """

    name: str
    help: str
    kind: FieldKind = FieldKind.TEXT
    _: KW_ONLY
    label: str = ""
    required: bool = False
    positional: bool = False
    many: bool = False
    choices: Sequence[str] = ()
    default: Any = None
    example: str = ""
    one_of: str = ""
    on_page: bool = True
    with_confirmation: bool = False
    by_tab: bool = False

    @property
    def title(self) -> str:
        return self.label or self.name.replace("_", " ").capitalize()


def argument(name: str, help: str, kind: FieldKind = FieldKind.TEXT, **more: Any) -> Field:
    """A required field that has no option name on the command line."""
    return Field(name, help, kind, required=True, positional=True, **more)


# How much one action does at most, unless a command gets another limit.
MOST: Final = 10_000


def at_most(noun: str) -> Field:
    """The field `limit` of an action."""
    text = f"at most so many {noun}, the oldest first (default: %(default)s)"
    return Field("limit", text, FieldKind.COUNT, default=MOST, on_page=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionPlan:
    """The planned effect of an action with given values. The page makes it again when the operator confirms the action.

    `subject`: the object of the action, as the audit names it. `effect`: the effect in words. `caution`: a warning, for
    example that the action cannot be undone. `nothing`: whether the action has nothing to do. `do` runs the action and
    returns the state afterwards; `do_because` also gets the operator's reason. `before`: the state before the action.
    `dangerous`: a command asks for a confirmation. `pinned`: values that the page sends again with the confirmation, so
    that the operator confirms the plan that the page showed. `refusal`: the reason why the action would be refused now,
    or ''.
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
    do_because: Callable[[str], Mapping[str, Any]] | None = None

    def run(self, why: str) -> Mapping[str, Any]:
        return self.do() if self.do_because is None else self.do_because(why)


Plan = Callable[[Values], ActionPlan]


@dataclass(frozen=True, slots=True)
class Button:
    """The button of an action, with the values of its fields. `tone`: plain, good or bad.

    `action`: the name of the action; a button that an action itself declares has it from there.
    """

    label: str
    tone: str = "plain"
    fields: Mapping[str, object] = field(default_factory=dict)
    action: str = ""


Offer = Callable[[Any], Sequence[Button | str]]
"""The buttons in a place, or texts that say why there are none.

It gets the row of a list or table; on a page, it gets all that the template has, by name.
"""


@dataclass(frozen=True, slots=True)
class GroupSection:
    """A section of the page of a group with one of its topics, with the form of an action on the two.

    `read` returns what holds now, as the content of a cell, and the present values of the form's fields; None if the
    page has no such section.
    """

    title: str
    button: str
    read: Callable[[Executor, str, str], tuple[object, Mapping[str, str]] | None]


@dataclass(frozen=True, slots=True)
class ListForm:
    """The form of an action above a list. `left_empty`: fields that this form does not show."""

    listing: str
    title: str
    button: str
    left_empty: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class DeclaredAction:
    """One kind of action.

    `name`: its name in the audit and in the page's address. `command`: the command as an operator writes it in a shell.
    `permission`: what the page requires; None if only a command runs the action. `shows_bodies`: the page also requires
    the permission to see them.

    `buttons`: where its buttons stand. A place is the name of a listing, for its rows; "LISTING selected", for the rows
    that the user ticks; or what a template names with `{% buttons %}`, such as "message" or "overview". `section` and
    `form`: where a form for its fields stands, on the page of a group or above a list.
    """

    name: str
    title: str
    command: str
    fields: Sequence[Field]
    plan: Plan
    permission: str | None = ACT
    buttons: Mapping[str, Offer] = field(default_factory=dict)
    section: GroupSection | None = None
    form: ListForm | None = None
    shows_bodies: bool = False

    @property
    def subcommand(self) -> str:
        """The subcommand, such as `pause`, or for a command without subcommands an option, such as `--drop`."""
        return self.command.partition(" ")[2]


def action(name: str, title: str, command: str, *fields: Field, **more: Any) -> Callable[[Plan], DeclaredAction]:
    """Declare the action that the decorated function plans. The parameters are those of `DeclaredAction`."""
    return lambda plan: DeclaredAction(name, title, command, fields, plan, **more)
