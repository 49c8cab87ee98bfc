"""Listings. Each list is declared once; its command's table and JSON, and the table of its page use the declaration.

    TOPICS = Listing("topics", [Column("Topic", "name"), …], read, command="outbox_topic list")

A cell is a value or a list of values, as `outbox.contrib.django.actions.cells` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from typing import Any, Final

from outbox.broker.database.executor import Executor
from outbox.contrib.django.actions.declaration import Field, Values

BOTH, PAGE, COMMAND = "", "page", "command"
_ALWAYS: Final[Callable[[Values], bool]] = lambda values: True  # noqa: E731
States = Mapping[str, tuple[str, Callable[[Any], bool]]]
"""The states by which the rows of a list can be filtered: the label and the condition of each. The first has all."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table. `cell`: the name of an attribute of the row, or a function that gets the row.

    `style`: head, number, id, key or lines. `on`: only a page or only a command has the column. `when`: whether a page
    with these values has it.
    """

    label: str
    cell: str | Callable[[Any], object]
    style: str = ""
    _: KW_ONLY
    on: str = BOTH
    when: Callable[[Values], bool] = _ALWAYS

    def of(self, row: Any) -> object:
        if not isinstance(self.cell, str):
            return self.cell(row)
        return row[self.cell] if isinstance(row, Mapping) else getattr(row, self.cell)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a command or a page asks a listing for. `broker` and `application` open a transaction on their database."""

    values: Values
    limit: int
    broker: Callable[[], AbstractContextManager[Executor]]
    application: Callable[[], AbstractContextManager[None]]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def only(self, *names: str) -> dict[str, Any]:
        return {name: self.values[name] for name in names}


@dataclass(frozen=True, slots=True)
class Choice:
    """Rows that the user ticks, for the buttons of actions. `field`: their field that gets the values of `value`.

    `value` returns None for a row that cannot be ticked. `needs`: a field that must be given, and goes to the actions.
    """

    field: str
    value: Callable[[Any], object | None]
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """A list of rows: a command, a page, or both.

    `name`: the name of the page, and of the list in the catalogue. `read` gets an Executor, and returns the rows, at
    most `Asked.limit`; if the list is not `of_broker`, it gets None. `command`: the command as an operator writes it in
    a shell; '' without one. `json`: the names of a row's attributes, where "a=b" prints b as a, or a function; by
    default the row itself. `after`: the field with the position after which a page begins, and `position` the position
    of a row; without them, the list is completely in memory. `engine`: the engine whose rows it reads.

    Of the page: `address`; '' without one. `tab`: the name of its tab above the lists of messages; the field
    `tab_group` has the consumer group whose messages the tabs count. `menu`: its section and name in the menu.
    `caption` and `empty`: what the table has, and the text without rows; `unused`: the text if the list has no rows
    in any state.
    `key` identifies a row. `notes` returns values for a `template` of its own, which extends listing.html. `is_live`:
    an open page reads the list again and again.
    """

    name: str
    columns: Sequence[Column]
    read: Callable[[Any, Asked], Sequence[Any]]
    _: KW_ONLY
    command: str = ""
    help: str = ""
    fields: Sequence[Field] = ()
    json: Sequence[str] | Callable[[Any], object] | None = None
    states: States = field(default_factory=dict)
    after: Field | None = None
    position: Callable[[Any], object] | None = None
    engine: str = "postgres"
    of_broker: bool = True
    address: str = ""
    title: str | Callable[[Values], str] = ""
    menu: tuple[str, str] | None = None
    tab: str | Callable[[Values], str] = ""
    tab_group: str = ""
    caption: str = ""
    empty: str = ""
    unused: str = ""
    key: Callable[[Any], str] | None = None
    choice: Choice | None = None
    notes: Callable[[Any, Asked, Sequence[Any]], Mapping[str, object]] | None = None
    template: str = "listing"
    is_live: bool = False

    def on(self, place: str, values: Values) -> list[Column]:
        """The columns of the table on a page (PAGE) or of a command (COMMAND)."""
        return [one for one in self.columns if one.on in (BOTH, place) and (place == COMMAND or one.when(values))]

    @contextmanager
    def opened(self, asked: Asked) -> Iterator[Executor | None]:
        """The transaction in which the rows are read."""
        if self.of_broker:
            with asked.broker() as run:
                yield run
        else:
            with asked.application():
                yield None

    def as_json(self, row: Any) -> object:
        """A row as a command prints it with --json. Times are written as ISO 8601."""
        if self.json is None or callable(self.json):
            return row if self.json is None else self.json(row)
        pairs = [(name, attribute or name) for name, _, attribute in (one.partition("=") for one in self.json)]
        found = {name: getattr(row, attribute) for name, attribute in pairs}
        return {name: one.isoformat() if isinstance(one, datetime) else one for name, one in found.items()}
