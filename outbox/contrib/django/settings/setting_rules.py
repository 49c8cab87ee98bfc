"""The rules of a setting's value: one per kind of value, each with an error that says what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from outbox import names
from outbox.broker.database.conninfo import read_conninfo
from outbox.broker.database.statement import check_schema_name
from outbox.broker.operations.thresholds import Threshold, Thresholds
from outbox.errors import ConfigurationError, InvalidName
from outbox.utils.safe_text import mask_passwords

# A setting's name and its value; returns the value to use, or raises ConfigurationError.
Rule = Callable[[str, Any], Any]

Entry = TypeVar("Entry")


def nearest(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key.upper(), [name.upper() for name in known], n=1, cutoff=0.5)
    if near:
        spelled = next(name for name in known if name.upper() == near[0])
        return f" Did you mean {spelled!r}?"
    return f" The settings are {', '.join(sorted(known))}."


def wrong(where: str, value: object, remedy: str) -> ConfigurationError:
    return ConfigurationError(
        f"{where} must be {remedy}; it is {mask_passwords(repr(value))} ({type(value).__name__})."
    )


def text(where: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise wrong(where, value, "a text that is not empty")
    return value


def text_or_none(where: str, value: Any) -> str | None:
    return None if value is None else text(where, value)


def module(where: str, value: Any) -> str:
    if not isinstance(value, str) or not all(map(str.isidentifier, value.split("."))):
        raise wrong(where, value, "the name of a module, like 'subscribers'")
    return value


def listen(where: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise wrong(where, value, "a connection string, '' to do without LISTEN, or None")
    read_conninfo(value or "", where)
    return value


def group(where: str, value: Any) -> str:
    try:
        return names.check_group(value)
    except InvalidName as error:
        raise ConfigurationError(f"{where}: {error}") from error


def schema(where: str, value: Any) -> str:
    try:
        return check_schema_name(text(where, value))
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from error


def flag(where: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong(where, value, "True or False")
    return value


def whole(minimum: int) -> Rule:
    def rule(where: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise wrong(where, value, f"a whole number, at least {minimum}")
        return value

    return rule


def seconds(minimum: float) -> Rule:
    def rule(where: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not minimum <= value < float("inf"):
            raise wrong(where, value, f"a number of seconds, at least {minimum:g}")
        return float(value)

    return rule


def address(where: str, value: Any) -> str | None:
    if value is None:
        return None
    host, _, port = text(where, value).rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise wrong(where, value, "HOST:PORT, like '0.0.0.0:9464', or None")
    return str(value)


def thresholds(where: str, value: Any) -> Thresholds:
    if not isinstance(value, Mapping):
        raise wrong(where, value, "a dictionary like {'LAG_SECONDS': (60, 600)}: warning and critical, None for never")
    known = {item.name.upper(): item.name for item in fields(Thresholds)}
    for key in value:
        if key not in known:
            raise ConfigurationError(f"{where}[{key!r}] is not a threshold.{nearest(str(key), list(known))}")
    return Thresholds(**{known[key]: limits(f"{where}[{key!r}]", pair) for key, pair in value.items()})


def limits(where: str, value: Any) -> Threshold:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise wrong(where, value, "a pair (warning, critical) of numbers, None for never")
    for one in value:
        if one is not None and (isinstance(one, bool) or not isinstance(one, (int, float)) or one < 0):
            raise wrong(where, value, "a pair (warning, critical) of numbers, at least 0, None for never")
    return Threshold(*value)


def masked_fields(where: str, value: Any) -> Mapping[str, frozenset[str]]:
    if not isinstance(value, Mapping):
        raise wrong(where, value, "a dictionary of field names by topic, '*' for all: {'*': ['password']}")
    found = {}
    for topic, given in value.items():
        if isinstance(given, str) or not all(isinstance(one, str) and one for one in given):
            raise wrong(f"{where}[{topic!r}]", given, "a list of field names, like ['password', 'iban']")
        found[str(topic)] = frozenset(one.lower() for one in given)
    return found


def options_of(where: str, value: Any, rules: Mapping[str, Rule], *, required: Sequence[str]) -> dict[str, Any]:
    """The checked options of one entry of a setting."""
    if not isinstance(value, Mapping):
        raise wrong(where, type(value), f"a dictionary with {', '.join(map(repr, required))}")
    for key in value:
        if key not in rules:
            raise ConfigurationError(f"{where}[{key!r}] is not an option.{nearest(str(key), list(rules))}")
    for key in required:
        if key not in value:
            raise ConfigurationError(f"{where} lacks {key!r}.")
    return {key: rules[key](f"{where}[{key!r}]", one) for key, one in value.items()}


def by_name(where: str, value: Any, example: str, entry: Rule) -> dict[str, Any]:
    """The entries of a setting by their names, each read by `entry`."""
    if not isinstance(value, Mapping):
        raise wrong(where, type(value), f"a dictionary {example}")
    return {group(f"{where}[{name!r}]", name): entry(f"{where}[{name!r}]", one) for name, one in value.items()}


def chosen(where: str, declared: Mapping[str, Entry], names: Sequence[str], purpose: str) -> dict[str, Entry]:
    """The entries with these names, or all. Raises ConfigurationError for an unknown name, and if there is no entry."""
    if not declared:
        raise ConfigurationError(f"{where} declares nothing {purpose}.")
    if unknown := sorted(set(names) - set(declared)):
        raise ConfigurationError(f"{where} has no {', '.join(unknown)}; it has {', '.join(sorted(declared))}.")
    return {name: one for name, one in declared.items() if not names or name in names}


def path_or_one_of(where: str, value: Any, known: Mapping[str, str]) -> str:
    """A dotted path, or a short name for one."""
    name = text(where, value)
    if "." not in name and name not in known:
        raise ConfigurationError(f"{where} = {name!r}: use one of {', '.join(known)}, or give a dotted path.")
    return known.get(name, name)


def keywords(where: str, value: Any) -> Mapping[str, Any]:
    """The constructor arguments of a class. An error does not show them, because they contain secrets."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ConfigurationError(f"{where} must be a dictionary of options, not a {type(value).__name__}.")
    return dict(value)
