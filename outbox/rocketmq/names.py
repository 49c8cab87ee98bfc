"""The names of topics and groups that RocketMQ allows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def wire_name(name: str) -> str:
    """A topic's or group's name without the dots that RocketMQ refuses: `order.paid` is `order-paid` there.

    `%` cannot serve as an escape: RocketMQ's schema allows it, but its proxy reads it as the end of a namespace.
    """
    return name.replace(".", "-")


def collisions(names: Iterable[str]) -> Iterator[str]:
    """The complaints about names that are the same in RocketMQ."""
    known: dict[str, str] = {}
    for name in names:
        other = known.setdefault(wire_name(name), name)
        if other != name:
            yield f"{other!r} and {name!r} are both {wire_name(name)!r} in RocketMQ: rename one of them."
