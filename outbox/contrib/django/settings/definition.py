"""The classes and functions with which settings are defined, and the function that reads a dictionary of settings.

    drain_seconds: float = setting(20.0, seconds(0), meaning="how long processes may take to stop")

A field of a frozen dataclass is one setting. The check of a value, the text of its error, and the tables in the
documents (`tables.py`) use the definition in this field.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar

from outbox import names
from outbox.broker.database.connection import read_conninfo
from outbox.broker.database.statement import check_schema_name
from outbox.errors import ConfigurationError, InvalidName
from outbox.utils.safe_text import mask_passwords

Entry = TypeVar("Entry")
Choice = TypeVar("Choice", bound=StrEnum)
Value = TypeVar("Value", covariant=True)

# -- a definition ----------------------------------------------------------------------------------

REQUIRED: Final = dataclasses.MISSING


@dataclass(frozen=True, slots=True)
class Rule(Generic[Value]):
    """The rule for the values of a setting.

    The documents print `kind` as the description of the allowed values, and `unit` as the unit of a number. `check`
    gets the place of the setting, as in "OUTBOX['BROKER']", and the given value, and returns the value to use or raises
    ConfigurationError.
    """

    kind: str
    check: Callable[[str, Any], Value]
    unit: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The definition of one setting. `name` is the name that a project writes; `shown` is the documented default.

    `section` names the table of docs/settings.md that lists the setting. A field without a section is in the section of
    the field before it. If `bundled_only` is true, engines other than the bundled broker ignore the setting or refuse
    it. If it is a text, they refuse any other value than the default with this text: the reason, and what to do.
    """

    name: str
    default: object
    rule: Rule[object]
    meaning: str
    section: str
    shown: str
    bundled_only: bool | str


def setting(
    default: Entry,
    rule: Rule[Entry],
    *,
    meaning: str,
    section: str = "",
    shown: str = "",
    bundled_only: bool | str = False,
    secret: bool = False,
) -> Entry:
    """Return a dataclass field for a setting. If `secret` is true, the repr of the dataclass hides the value."""
    definition = {"rule": rule, "meaning": meaning, "section": section, "shown": shown, "bundled_only": bundled_only}
    value: Any = {"default_factory": default.copy} if isinstance(default, dict) else {"default": default}
    return field(**value, repr=not secret, metadata=definition)  # type: ignore[no-any-return]


def required(rule: Rule[Entry], *, meaning: str) -> Entry:
    """Like `setting`, but without a default: `read` refuses a dictionary without this key."""
    made: Any = setting(REQUIRED, rule, meaning=meaning)
    return made  # type: ignore[no-any-return]


def definitions(kind: type) -> Mapping[str, Setting]:
    """Return the settings of a dataclass by attribute name. If a setting has a section, its `name` is in capitals."""
    found: dict[str, Setting] = {}
    section = ""
    for item in dataclasses.fields(kind):
        section = item.metadata["section"] or section
        name = item.name.upper() if section else item.name
        default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        found[item.name] = Setting(**{**item.metadata, "name": name, "default": default, "section": section})
    return found


def read(kind: type[Entry], where: str, given: object) -> Entry:
    """Check the dictionary at the place `where` (as in "OUTBOX['TOPICS']['orders']"), and return its settings.

    Raises ConfigurationError for an unknown name, a wrong value, or a missing required key.
    """
    [found] = read_together((kind,), where, given, noun="option")
    assert isinstance(found, kind)
    return found


def read_together(
    kinds: Sequence[type],
    where: str,
    given: object,
    *,
    noun: str = "setting",
    elsewhere: Callable[[str], str | None] = lambda name: None,
) -> list[Any]:
    """Like `read`, for a dictionary whose names are divided among several dataclasses; return one of each.

    `elsewhere` returns what to do about an unknown name that belongs to a class that is not there.
    """
    known = {item.name: (kind, attribute, item) for kind in kinds for attribute, item in definitions(kind).items()}
    needed = [name for name, (_, _, item) in known.items() if item.default is REQUIRED]
    if not isinstance(given, Mapping):
        options = ", ".join(map(repr, needed)) or f"options like {next(iter(known))!r}"
        # The error does not show the value, because it may contain secrets.
        raise ConfigurationError(f"{where} must be a dictionary with {options}, not a {type(given).__name__}.")
    values: dict[type, dict[str, Any]] = {kind: {} for kind in kinds}
    for name, value in given.items():
        if name not in known:
            if (remedy := elsewhere(name)) is not None:
                raise ConfigurationError(f"{where}[{name!r}] has no effect: {remedy}.")
            raise unknown(where, name, noun, known)
        kind, attribute, item = known[name]
        values[kind][attribute] = item.rule.check(f"{where}[{name!r}]", value)
    for name in needed:
        if name not in given:
            raise ConfigurationError(f"{where} lacks {name!r}.")
    return [kind(**of_kind) for kind, of_kind in values.items()]


# -- errors ----------------------------------------------------------------------------------------


def unknown(where: str, name: object, noun: str, known: Iterable[str]) -> ConfigurationError:
    """Return the error for an unknown name. The error shows the most similar known name, or all known names."""
    by_capitals = {one.upper(): one for one in known}
    near = difflib.get_close_matches(str(name).upper(), by_capitals, n=1, cutoff=0.5)
    if near:
        remedy = f"Did you mean {by_capitals[near[0]]!r}?"
    else:
        remedy = f"The {noun}s are {', '.join(sorted(by_capitals.values()))}."
    article = "an" if noun[0] in "aeiou" else "a"
    return ConfigurationError(f"{where}[{name!r}] is not {article} {noun}. {remedy}")


def wrong(where: str, value: object, allowed: str) -> ConfigurationError:
    """Return the error for a value that is not allowed. The error masks passwords in the value."""
    return ConfigurationError(
        f"{where} must be {allowed}; it is {mask_passwords(repr(value))} ({type(value).__name__})."
    )


# -- kinds of values -------------------------------------------------------------------------------


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise wrong(where, value, "a text that is not empty")
    # An f-string shows a member of `class Topics(str, Enum)` as "Topics.ORDER".
    return str.__str__(value)


def texts(kind: str) -> Rule[Sequence[str]]:
    """Return the rule for a list of texts that are not empty. The error does not show the texts."""

    def check(where: str, value: Any) -> Sequence[str]:
        if not isinstance(value, (list, tuple)):
            raise ConfigurationError(f"{where} must be {kind.replace('`', '')}, not a {type(value).__name__}.")
        return tuple(_text(f"{where}[{place}]", one) for place, one in enumerate(value))

    return Rule(kind, check)


def text(kind: str) -> Rule[str]:
    return Rule(kind, _text)


any_text: Final = text("text")


def or_none(rule: Rule[Entry]) -> Rule[Entry | None]:
    """Return the rule that allows None, and all values that `rule` allows."""

    def check(where: str, value: Any) -> Entry | None:
        return None if value is None else rule.check(where, value)

    return Rule(f"{rule.kind}, or `None`", check, rule.unit)


def _flag(where: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong(where, value, "True or False")
    return value


flag: Final = Rule("`True`, `False`", _flag)


def whole(minimum: int, unit: str, maximum: int | None = None, *, most: int = names.MAX_INTEGER) -> Rule[int]:
    """Return the rule for a whole number of `unit`. The documents name `maximum`, but not `most`, which few reach."""
    limits = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"

    def check(where: str, value: Any) -> int:
        if not names.is_whole(value, minimum, most if maximum is None else maximum):
            raise wrong(
                where, value, f"a whole number of {unit}, {limits}" + ("" if maximum else f" and at most {most:,}")
            )
        return int(value)

    return Rule(f"{'whole ' if unit == 'seconds' else ''}{unit}, {limits}", check, unit)


def seconds(minimum: float, *, most: int = names.MAX_WAIT_SECONDS) -> Rule[float]:
    """Return the rule for a number of seconds from `minimum` to `most`."""

    def check(where: str, value: Any) -> float:
        if not names.is_seconds(value, most) or value < minimum:
            raise wrong(where, value, f"a number of seconds, at least {minimum:g} and at most {most:,}")
        return float(value)

    return Rule(f"seconds, at least {minimum:g}", check, "seconds")


def one_of(*allowed: str, because: str = "") -> Rule[str]:
    """Return the rule that allows only the given texts. The error shows `because` instead of these texts, if given."""
    listed = because or (" or " if len(allowed) == 2 else ", ").join(map(repr, allowed))

    def check(where: str, value: Any) -> str:
        if value not in allowed:
            raise wrong(where, value, listed if len(allowed) == 2 else f"one of {listed}")
        return _text(where, value)

    return Rule(_quoted(allowed), check)


def _quoted(values: Iterable[str]) -> str:
    return ", ".join(f'`"{one}"`' for one in values)


def member(kind: type[Choice]) -> Rule[Choice]:
    named = one_of(*map(str, kind))
    return Rule(named.kind, lambda where, value: kind(named.check(where, value)))


def members(kind: type[Choice]) -> Rule[frozenset[Choice]]:
    """Return the rule for a list of values of an enumeration. An empty list is not allowed."""
    allowed = f"a list of {', '.join(map(repr, map(str, kind)))}"

    def check(where: str, value: Any) -> frozenset[Choice]:
        if isinstance(value, str) or not isinstance(value, (list, tuple, set, frozenset)):
            raise wrong(where, value, allowed)
        if not value or any(item not in list(kind) for item in value):
            raise wrong(where, value, allowed)
        return frozenset(kind(item) for item in value)

    return Rule(f"a list of {', '.join(f'`{one}`' for one in kind)}", check)


def named_or_path(known: Mapping[str, str]) -> Rule[str]:
    """Return the rule for a dotted path, or for one of the short names in `known`."""

    def check(where: str, value: Any) -> str:
        name = _text(where, value)
        if "." not in name and name not in known:
            raise ConfigurationError(f"{where} = {name!r}: use one of {', '.join(known)}, or a dotted path.")
        return known.get(name, name)

    return Rule(f"{_quoted(known)}, or a dotted path", check)


def entries(entry: Callable[[str, str, Any], Entry], *, name: str, example: str) -> Rule[Mapping[str, Entry]]:
    """Return the rule for a dictionary {name: entry}. `entry` gets the place of an entry, its name and its value."""

    def check(where: str, value: Any) -> Mapping[str, Entry]:
        if not isinstance(value, Mapping):
            # The error does not show the value, because it may contain secrets.
            raise ConfigurationError(f"{where} must be a dictionary {example}, not a {type(value).__name__}.")
        return {one: entry(f"{where}[{one!r}]", one, given) for one, given in value.items()}

    return Rule(f"`{{{name}: options}}`", check)


def _keywords(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        # The error does not show the value, because it contains secrets.
        raise ConfigurationError(f"{where} must be a dictionary of options, not a {type(value).__name__}.")
    return dict(value)


def _listen_url(where: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise wrong(where, value, "a connection string, '' to do without LISTEN, or None")
    read_conninfo(value or "", where)
    return value


def _group(where: str, value: Any) -> str:
    try:
        return names.check_group(value)
    except InvalidName as error:
        raise ConfigurationError(f"{where}: {error}") from error


def _schema(where: str, value: Any) -> str:
    try:
        return check_schema_name(_text(where, value))
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from error


def _address(where: str, value: Any) -> str:
    given = _text(where, value)
    host, _, port = given.rpartition(":")
    if not host.strip("[]") or not port.isdigit() or int(port) > 65535:
        raise wrong(where, value, "HOST:PORT, like '0.0.0.0:9464' or '[::]:9464', or None")
    return given


def _masked_fields(where: str, value: Any) -> Mapping[str, frozenset[str]]:
    if not isinstance(value, Mapping):
        raise wrong(
            where,
            value,
            "a dictionary {topic: list of field names}, in which '*' means all topics, like {'*': ['password']}",
        )
    found = {}
    for topic, given in value.items():
        if (
            isinstance(given, str)
            or not isinstance(given, Collection)
            or not all(isinstance(one, str) and one for one in given)
        ):
            raise wrong(f"{where}[{topic!r}]", given, "a list of field names, like ['password', 'iban']")
        found[_text(f"{where}[{topic!r}]", topic)] = frozenset(one.lower() for one in given)
    return found


def _dotted_paths(where: str, value: Any) -> Mapping[str, str]:
    if not isinstance(value, Mapping):
        raise wrong(where, value, "a dictionary {name: dotted path}, like {'paid orders': 'shop.messages.paid'}")
    return {_text(where, name): _text(f"{where}[{name!r}]", path) for name, path in value.items()}


dotted_path: Final = or_none(text("dotted path"))
dotted_paths: Final = Rule("`{name: dotted path}`", _dotted_paths)
paths: Final = texts("a list of dotted paths")
keywords: Final = Rule("a dictionary", _keywords)
listen_conninfo: Final = Rule('URL, `""`, or `None`', _listen_url)
group: Final = Rule("name of a group", _group)
schema_name: Final = Rule("name of a schema", _schema)
address: Final = or_none(Rule("`HOST:PORT`", _address))
field_names: Final = Rule("`{topic: [field]}`", _masked_fields)
