"""`@event` declares a type of messages, and `@upcast` turns a stored body of an old version into a newer one.

A message of an event carries the event's name and version in two headers, so every engine, sink and receiver transports
them. A message without these headers counts as version 1 of the event that its handler expects: it was published
before the event had a type, or by a publisher without types.

See decision 251.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType, UnionType
from typing import Any, Final, TypeVar, Union, get_args, get_origin

from outbox import names
from outbox.codec import UnreadBody
from outbox.erased import ERASED
from outbox.errors import ConfigurationError, NeedsNewerCode, UndecodableBody, UnserialisableBody
from outbox.events.shapes import Shape, ShapeError, is_shaped, shape_of
from outbox.message import Delivery
from outbox.utils.safe_text import error_line, shown_text

EVENT_HEADER: Final = "outbox-event"
VERSION_HEADER: Final = "outbox-event-version"
_MOST_DIGITS: Final = 6

Kind = TypeVar("Kind", bound=type)
Change = TypeVar("Change", bound=Callable[[Any], Any])
# A version of an event: its name and its number.
Version = tuple[str, int]


class UnknownEventVersion(NeedsNewerCode):
    """Newer code has published the message, and this process does not know its event or its version.

    The message waits, without an attempt, for a process that knows `version` of `event`.
    """

    event: str = ""
    version: int = 0

    def __init__(self, message: str | None = None, *, event: str, version: int) -> None:
        super().__init__(message)
        self.event = event
        self.version = version


@dataclass(frozen=True, slots=True)
class EventType:
    """A declared event. `headers` are the two headers of its messages."""

    name: str
    version: int
    topic: str
    kind: type
    shape: Shape
    key: str | Callable[[Any], object] | None
    tag: str | Callable[[Any], str]
    headers: Mapping[str, str]

    @property
    def at(self) -> Version:
        """The name and the version."""
        return self.name, self.version

    def key_of(self, value: Any) -> object:
        """Return the key of an event, or '' without a declared key."""
        if self.key is None:
            return ""
        return self.key(value) if callable(self.key) else getattr(value, self.key)

    def tag_of(self, value: Any) -> str:
        """Return the tag of an event, or '' without a declared tag."""
        return self.tag(value) if callable(self.tag) else self.tag

    def body_of(self, value: Any) -> Any:
        """Return the body of an event, for the codec of its topic. Raises UnserialisableBody."""
        try:
            return self.shape.write(value)
        except ShapeError as error:
            raise UnserialisableBody(
                f"event {self.name!r} (version {self.version}) has a value that its readers refuse: "
                f"{shown_text(error)}. Nothing was published. Correct the value, or the type of the field in "
                f"{self.kind.__qualname__}."
            ) from None


_by_kind: Final[dict[type, EventType]] = {}
_by_version: Final[dict[Version, EventType]] = {}
# From version -> to version -> function.
_changes: Final[dict[Version, dict[Version, Callable[[Any], Any]]]] = {}


def event(
    name: str,
    *,
    version: int = 1,
    topic: str | None = None,
    key: str | Callable[[Any], object] | None = None,
    tag: str | Callable[[Any], str] = "",
) -> Callable[[Kind], Kind]:
    """Declare a dataclass or a pydantic model as version `version` of the event `name`.

    `publish(OrderPaid(...))` publishes an event of the type to `topic`, by default the topic `name`. `key` is the name
    of a field, or a function of the event. `tag` is a text, or a function of the event. Raises ConfigurationError.
    """
    names.check_topic(topic or name)
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version < 10**_MOST_DIGITS:
        raise ConfigurationError(f"event {name!r}: version={version!r} must be a whole number, 1 or more.")

    def declare(kind: Kind) -> Kind:
        shape = shape_of(kind)
        if isinstance(key, str) and key not in shape.written.get("properties", {key: None}):
            raise ConfigurationError(f"event {name!r}: key={key!r} is not a field of {kind.__qualname__}.")
        declared = EventType(
            name=name,
            version=version,
            topic=topic or name,
            kind=kind,
            shape=shape,
            key=key,
            tag=tag,
            headers=MappingProxyType({EVENT_HEADER: name, VERSION_HEADER: str(version)}),
        )
        known = _by_version.get(declared.at)
        if known is not None and _path(known.kind) != _path(kind):
            raise ConfigurationError(
                f"version {version} of event {name!r} is declared by {_path(known.kind)} and by {_path(kind)}: give "
                "one of the two another version or another name."
            )
        if known is not None:
            _by_kind.pop(known.kind, None)
        _by_kind[kind] = _by_version[declared.at] = declared
        _find_changes.cache_clear()
        return kind

    return declare


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def upcast(name: str, version: int, *, to: Version | None = None) -> Callable[[Change], Change]:
    """Turn a stored body of version `version` of the event `name` into a body of the next version.

    The function gets the decoded body, and returns the body of the next version. outbox chains the functions until the
    body has a version that the handler expects. With `to=("other.event", 1)`, the function leads to another event: this
    renames an event. If an event was split, declare one function per new event. A function may also return a declared
    event instead of a body; then the chain ends there. Raises ConfigurationError.
    """
    target = (name, version + 1) if to is None else to
    if target == (name, version):
        raise ConfigurationError(f"@upcast({name!r}, {version}) leads to itself: give it another `to`.")

    def register(change: Change) -> Change:
        known = _changes.setdefault((name, version), {}).get(target)
        if known is not None and (known.__module__, known.__qualname__) != (change.__module__, change.__qualname__):
            raise ConfigurationError(
                f"@upcast({name!r}, {version}) to {target} is declared by {known.__module__}.{known.__qualname__} and "
                f"by {change.__module__}.{change.__qualname__}: remove one of the two."
            )
        _changes[name, version][target] = change
        _find_changes.cache_clear()
        return change

    return register


def events() -> list[EventType]:
    """Return all declared events, by name and version."""
    return [_by_version[at] for at in sorted(_by_version)]


def find_event(kind: object) -> EventType | None:
    """Return the declaration of a type; None if the type is not an event."""
    return _by_kind.get(kind) if isinstance(kind, type) else None


_SCHEMA: Final = "urn:event:"


def schema_id(name: str, version: int | str) -> str:
    """Return the URI of the schema of an event: `$id` of its JSON Schema, and `dataschema` of its CloudEvents."""
    return f"{_SCHEMA}{name}:{version}"


def headers_of_schema(uri: str) -> dict[str, str]:
    """Return the two headers of the event with this schema; an empty dictionary for any other URI."""
    name, _, version = uri.removeprefix(_SCHEMA).rpartition(":")
    if not uri.startswith(_SCHEMA) or not name or not version.isdigit():
        return {}
    return {EVENT_HEADER: name, VERSION_HEADER: version}


def expected_events(annotation: Any) -> tuple[type, ...]:
    """Return the types of events in the annotation of a handler's parameter, as in `Delivery[OrderPaid | OrderLost]`.

    Return an empty tuple for a handler without a type, which gets the decoded bodies.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return tuple(kind for one in arguments for kind in expected_events(one))
    if isinstance(origin, type) and issubclass(origin, Delivery):
        return tuple(kind for one in arguments for kind in _kinds(one))
    if origin is not None and arguments:
        return expected_events(arguments[0])
    return ()


def _kinds(annotation: Any) -> tuple[type, ...]:
    if get_origin(annotation) in (Union, UnionType):
        return tuple(kind for one in get_args(annotation) for kind in _kinds(one))
    if find_event(annotation) is not None:
        return (annotation,)
    if is_shaped(annotation):
        raise ConfigurationError(
            f"the handler expects {annotation.__qualname__}, which is not an event: write @event(…) above this class."
        )
    return ()


def leads_to(start: Version, end: Version) -> bool:
    """Whether a body of version `start` can be turned into version `end` by the declared functions."""
    return start == end or _find_changes(start, frozenset((end,))) is not None


def forget() -> None:
    """Forget all events and upcasts, for tests."""
    for known in (_by_kind, _by_version, _changes):
        known.clear()
    _find_changes.cache_clear()


@contextmanager
def restored() -> Iterator[None]:
    """At the end of the block, forget the events and upcasts that were declared inside it, for tests."""
    kinds, versions = dict(_by_kind), dict(_by_version)
    changes = {start: dict(targets) for start, targets in _changes.items()}
    try:
        yield
    finally:
        for known, before in ((_by_kind, kinds), (_by_version, versions), (_changes, changes)):
            known.clear()
            known.update(before)  # type: ignore[arg-type]
        _find_changes.cache_clear()


# -- reading ---------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _find_changes(start: Version, ends: frozenset[Version]) -> tuple[tuple[Version, Callable[[Any], Any]], ...] | None:
    """Return the shortest chain of functions from `start` to one of `ends`: each function with its target."""
    seen = {start}
    waiting: deque[tuple[Version, tuple[tuple[Version, Callable[[Any], Any]], ...]]] = deque([(start, ())])
    while waiting:
        at, chain = waiting.popleft()
        if at in ends:
            return chain
        for target, change in _changes.get(at, {}).items():
            if target not in seen:
                seen.add(target)
                waiting.append((target, (*chain, (target, change))))
    return None


def read_event(expected: tuple[type, ...], topic: str, headers: Mapping[str, str], body: Any) -> Any:
    """Return the event of a message, for a handler that expects one of these types. An erased body stays ERASED.

    Raises UnknownEventVersion if this process cannot know the version, because newer code has published the message:
    the message waits. Raises UndecodableBody if no wait could help.
    """
    if body is ERASED:
        return body
    wanted = {_by_kind[kind].at: _by_kind[kind] for kind in expected}
    at = _version_of(wanted, topic, headers)
    found = wanted.get(at)
    if found is None:
        chain = _find_changes(at, frozenset(wanted))
        if chain is None:
            raise _unreadable(at, wanted)
        body = _read(body)
        for target, change in chain:
            body = _apply_change(at, target, change, body)
            if type(body) in _by_kind:
                return _checked(at, body, expected)
            found = wanted.get(target)
    assert found is not None
    try:
        return found.shape.read(_read(body))
    except ShapeError as error:
        raise UndecodableBody(
            f"the body is not version {found.version} of event {found.name!r} (published as version {at[1]} of "
            f"{at[0]!r}): {shown_text(error)}. Correct the publisher, or declare @upcast({at[0]!r}, {at[1]}); then "
            "replay the message."
        ) from error


def _read(body: Any) -> Any:
    return body.read() if isinstance(body, UnreadBody) else body


def _version_of(wanted: Mapping[Version, EventType], topic: str, headers: Mapping[str, str]) -> Version:
    name, text = headers.get(EVENT_HEADER), headers.get(VERSION_HEADER, "1")
    if name is None:
        names_ = {one for one, _ in wanted}
        if len(names_) == 1:
            return names_.pop(), 1
        raise UndecodableBody(
            f"the message of topic {topic!r} has no header {EVENT_HEADER!r}, and the handler expects several events: "
            f"{', '.join(sorted(names_))}. Publish events with their types, or let a handler without a type read it."
        )
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise UndecodableBody(f"header {VERSION_HEADER}={text!r:.80} of event {name!r} must be a whole number.")
    return name, int(text)


def _apply_change(at: Version, target: Version, change: Callable[[Any], Any], body: Any) -> Any:
    try:
        return change(body)
    except Exception as error:
        raise UndecodableBody(
            f"@upcast to version {target[1]} of {target[0]!r}, {change.__module__}.{change.__qualname__}, failed at a "
            f"body that was published as version {at[1]} of {at[0]!r}: {error_line(error)}. Correct the "
            "function, then replay the message."
        ) from error


def _checked(at: Version, value: Any, expected: tuple[type, ...]) -> Any:
    if isinstance(value, expected):
        return value
    raise UndecodableBody(
        f"@upcast of version {at[1]} of {at[0]!r} returned {type(value).__qualname__}, but the handler expects "
        f"{_titles(expected)}: add the type to the annotation of the handler, as in Delivery[A | B]."
    )


def _unreadable(at: Version, wanted: Mapping[Version, EventType]) -> UndecodableBody | UnknownEventVersion:
    name, version = at
    newest = max((number for known, number in _known_versions() if known == name), default=0)
    expected = ", ".join(f"{one.name!r} version {one.version}" for one in wanted.values())
    if version > newest:
        return UnknownEventVersion(
            f"the message is version {version} of event {name!r}, and this process knows "
            + (f"no version above {newest}" if newest else "no event of this name")
            + f"; its handler expects {expected}. The message waits, and the call does not count as an attempt. Deploy "
            "the code that declares this version.",
            event=name,
            version=version,
        )
    if name in {known for known, _ in wanted}:
        return UndecodableBody(
            f"the message is version {version} of event {name!r}, and no @upcast leads from it to {expected}: declare "
            f"@upcast({name!r}, {version}), then replay the message."
        )
    return UndecodableBody(
        f"the message is event {name!r}, but its handler expects {expected}: add the type to the annotation of the "
        "handler, as in Delivery[A | B], or select messages with tag= or filter=; then replay the message."
    )


def _known_versions() -> Iterator[Version]:
    yield from _by_version
    yield from _changes
    for targets in _changes.values():
        yield from targets


def _titles(kinds: tuple[type, ...]) -> str:
    return " or ".join(kind.__qualname__ for kind in kinds)
