"""The table of an event's fields: paths, types and defaults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal

import pytest

from outbox import event
from outbox.events import declaration
from outbox.events.declaration import find_event
from outbox.events.fields import fields_of


@pytest.fixture(autouse=True)
def declared() -> Iterator[None]:
    with declaration.restored():
        yield


@dataclass(frozen=True)
class Line:
    sku: str
    price: Decimal


@dataclass(frozen=True)
class Node:
    name: str
    children: list[Node] = field(default_factory=list)


def test_fields_are_listed_with_those_inside_them() -> None:
    @event("order.listed")
    @dataclass(frozen=True)
    class Listed:
        number: int
        lines: list[Line]
        prices: dict[str, Decimal]
        place: tuple[float, float]
        tree: Node
        state: Literal["new", "paid"] = "new"
        note: str | None = None
        other: Line | None = None

    found = find_event(Listed)
    assert found is not None
    rows = [(one.path, one.type, one.required) for one in fields_of(found.shape.written)]
    assert rows == [
        ("number", "integer", True),
        ("lines", "array of Line", True),
        ("lines[].sku", "string", True),
        ("lines[].price", "string (decimal)", True),
        ("prices", "map of string (decimal)", True),
        ("place", "array of number, number", True),
        ("tree", "Node", True),
        ("tree.name", "string", True),
        ("tree.children", "array of Node", False),
        ("state", '"new" or "paid"', False),
        ("note", "string or null", False),
        ("other", "Line or null", False),
        ("other.sku", "string", True),
        ("other.price", "string (decimal)", True),
    ]
