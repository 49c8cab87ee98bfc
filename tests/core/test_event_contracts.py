"""Contracts: what `outbox_contract check` allows and refuses, with the field and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, make_dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import pytest

from outbox.errors import ConfigurationError
from outbox.events import declaration, event, upcast
from outbox.events.contract import check, declared_contracts, read_contracts, write_contracts, written
from outbox.events.declaration import EventType, find_event

NO_DEFAULT: Any = object()


@pytest.fixture(autouse=True)
def declared() -> Iterator[None]:
    with declaration.restored():
        declaration.forget()
        yield


def declare(version: int = 1, name: str = "paid", **fields: Any) -> EventType:
    """Declare an event with these fields: an annotation, or an annotation and a default."""
    made = [
        (key, given[0], field(default=given[1])) if isinstance(given, tuple) else (key, given)
        for key, given in fields.items()
    ]
    kind = event(name, version=version)(make_dataclass("Paid", made, kw_only=True))
    found = find_event(kind)
    assert found is not None
    return found


def problems(folder: Path) -> list[str]:
    return [str(one) for one in check(read_contracts(folder), declared_contracts())]


def commit(folder: Path) -> None:
    write_contracts(folder, written(read_contracts(folder), declared_contracts()))


def after(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The problems after a change of an event whose old form is committed; that it is not written is no surprise."""
    declare(**old)
    commit(folder)
    declaration.forget()
    declare(**new)
    return [text for text in problems(folder) if "not in the committed contracts" not in text]


def test_a_change_of_one_version(tmp_path: Path) -> None:
    # What new code cannot read, and what old code cannot read.
    changes: list[tuple[dict[str, Any], dict[str, Any], list[str], list[str]]] = [
        ({"a": int}, {"a": int, "b": (str, "")}, [], []),
        ({"a": int}, {"a": int, "b": str}, ["b"], []),
        ({"a": int, "b": str}, {"a": int}, [], ["b"]),
        ({"a": int, "b": (str, "")}, {"a": int}, [], []),
        ({"a": int}, {"a": float}, [], ["a"]),
        ({"a": int}, {"a": int | None}, [], ["a"]),
        ({"a": str}, {"a": Decimal}, ["a"], []),
        ({"a": Literal["x"]}, {"a": Literal["x", "y"]}, [], ["a"]),
        ({"a": list[int]}, {"a": list[str]}, ["a[]"], ["a[]"]),
    ]
    for number, (old, new, *refused) in enumerate(changes):
        found = after(tmp_path / str(number), old, new)
        declaration.forget()
        # One line per direction; each names the field and a remedy.
        for code, fields in zip(("new code", "old code"), refused, strict=True):
            named = [text.split(" field ")[1].split(":")[0] for text in found if f"{code} cannot read" in text]
            assert named == fields, (old, new, found)
        assert all("Remedy: " in text for text in found)


def test_a_new_version_needs_a_way_from_the_old_one(tmp_path: Path) -> None:
    [text] = after(tmp_path, {"a": int}, {"version": 2, "b": str})
    assert "no function turns them into a newer version. Remedy: declare @upcast('paid', 1)" in text
    upcast("paid", 1)(dict)
    commit(tmp_path)
    assert problems(tmp_path) == []
    # A rename: the last version of the old event leads to the new one.
    declaration.forget()
    declare(name="settled", b=str)
    upcast("paid", 1)(dict)
    upcast("paid", 2, to=("settled", 1))(dict)
    assert [text.split(". Remedy")[0] for text in problems(tmp_path)] == [
        "settled version 1: the type is not in the committed contracts"
    ]


def test_a_field_does_not_come_back_with_another_type(tmp_path: Path) -> None:
    """Against the last form only, both steps would be allowed, and a stored message of the first form would break."""
    for fields in ({"a": int, "b": (int, 0)}, {"a": int}):
        declare(**fields)
        assert [text for text in problems(tmp_path) if "not in the committed" not in text] == []
        commit(tmp_path)
        declaration.forget()
    declare(a=int, b=(str, ""))
    found = [text for text in problems(tmp_path) if " field b: " in text]
    assert len(found) == 2 and "readers expect string, and writers write integer" in found[0]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "paid.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"paid\.json is no contract"):
        read_contracts(tmp_path)
