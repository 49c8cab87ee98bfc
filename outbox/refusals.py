"""Refusals: for each engine a table of the features that the engine lacks, with an alternative for each feature.

If a project declares or calls a feature that its engine lacks, outbox raises an error. docs/engines.md compares the
engines, and says what the in-memory broker of tests ignores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from outbox.errors import NotSupported
from outbox.subscription import Subscription
from outbox.topic import Topic


@dataclass(frozen=True, slots=True)
class Refusal:
    """A feature that the engine lacks, and an alternative for it."""

    lacks: str
    instead: str


@dataclass(frozen=True, slots=True)
class DeclaredSubscription:
    """A subscription as a project declares it. `topic` is None if the project does not declare the topic."""

    subscription: Subscription
    topic: Topic | None
    inbox: bool


@dataclass(frozen=True, slots=True)
class Refusals:
    """The refusals of one engine.

    An entry of `topics` or `subscriptions` is a predicate and a refusal. The engine refuses a topic or subscription for
    which the predicate is true. `calls` maps the names of refused methods of the port, or of refused features, to
    refusals.
    """

    engine: str
    topics: Sequence[tuple[Callable[[Topic], bool], Refusal]] = ()
    subscriptions: Sequence[tuple[Callable[[DeclaredSubscription], bool], Refusal]] = ()
    calls: Mapping[str, Refusal] = field(default_factory=dict)

    def of_topic(self, topic: Topic) -> Iterator[str]:
        """Yield a text for each refused property of the topic."""
        for applies, refusal in self.topics:
            if applies(topic):
                yield self._text(f"topic {topic.name!r}", refusal)

    def of_subscription(self, wanted: Subscription, topic: Topic | None, *, inbox: bool = True) -> Iterator[str]:
        """Yield a text for each refused property of the subscription."""
        declared = DeclaredSubscription(wanted, topic, inbox)
        for applies, refusal in self.subscriptions:
            if applies(declared):
                yield self._text(f"group {wanted.group!r} on topic {wanted.topic!r}", refusal)

    def require(self, call: str, what: str) -> None:
        """Raise NotSupported if the engine refuses the call. The error text begins with `what`, a name for the call."""
        if call in self.calls:
            self.refuse(call, what)

    def refuse(self, call: str, what: str) -> NoReturn:
        """Raise NotSupported for a call that is in the table `calls`."""
        raise NotSupported(self._text(what, self.calls[call]))

    def _text(self, what: str, refusal: Refusal) -> str:
        return f"{what}: the engine {self.engine} has no {refusal.lacks}. {refusal.instead}"
