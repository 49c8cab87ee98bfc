"""What every engine is on Django's side: publishers, workers, checks and commands ask it what depends on the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, cast

from django.core.checks import CheckMessage

from outbox.broker.log.topics import TopicCatalog
from outbox.codec import Codec, Codecs
from outbox.contrib.django.settings.conf import OutboxSettings, imported
from outbox.errors import ConfigurationError
from outbox.ports import AnyHandler, Broker, Consumers, LeftoverWork
from outbox.refusals import Refusals
from outbox.subscription import Subscription


class Engine(ABC):
    """One engine of these settings. Making it connects to nothing; a method that an engine does not need does nothing.

    `has_broker_process`: whether a worker runs a process that sequences. `pass_names`: further periodic passes of a
    producer service.
    """

    refusals: ClassVar[Refusals]
    has_broker_process: ClassVar[bool] = True
    pass_names: ClassVar[Sequence[str]] = ()

    def __init__(self, settings: OutboxSettings) -> None:
        self.settings = settings

    @cached_property
    @abstractmethod
    def broker(self) -> Broker:
        """The broker's port for this process. Raises ConfigurationError."""

    @cached_property
    def codecs(self) -> Codecs:
        """The codec of this project, and those of its topics. Raises ConfigurationError."""
        settings = self.settings
        default = None if settings.codec is None else _codec("OUTBOX['CODEC']", settings.codec)
        by_topic = {
            name: _codec(f"OUTBOX['TOPICS'][{name!r}]['codec']", declared.codec)
            for name, declared in settings.topics.items()
            if declared.codec is not None
        }
        return Codecs(default, by_topic=by_topic)

    @cached_property
    def catalog(self) -> TopicCatalog:
        """The topics of a broker in PostgreSQL, with the declared selectors. Raises ConfigurationError."""
        settings = self.settings
        selectors: dict[str, Callable[..., int]] = {
            name: imported(f"OUTBOX['TOPICS'][{name!r}]['selector']", declared.selector)
            for name, declared in settings.topics.items()
            if declared.selector is not None
        }
        return TopicCatalog(settings.schema, auto_create=settings.auto_create_topics, selectors=selectors)

    @abstractmethod
    def check(self) -> Iterator[CheckMessage]:
        """What is wrong with the settings and the declarations on this engine, for `manage.py check`."""

    def refused(self) -> Iterator[str]:
        """The declarations that this engine refuses, with what works instead. Raises ConfigurationError."""
        return iter(())

    def require(self) -> None:
        """Raise ConfigurationError for the first refused declaration."""
        for text in self.refused():
            raise ConfigurationError(text)

    @abstractmethod
    def consumers(self, wanted: Sequence[tuple[Subscription, AnyHandler]], *, leads: bool = False) -> Consumers:
        """What runs these subscriptions in this process. `leads`: it sequences too, where an engine sequences.

        Raises ConfigurationError.
        """

    def sequence(self) -> int:
        """Put all decided messages into their queues now; returns their number. Raises BrokerError."""
        return 0

    def settle(self) -> int:
        """Decide half messages that no commit decides, in a test on the broker in memory; returns their number."""
        return 0

    def run_pass(self, name: str) -> Mapping[str, Any]:
        """Run one of `pass_names` and return its counts. Raises BrokerError."""
        raise NotImplementedError(name)

    def is_asked(self) -> bool:
        """Whether check-back can ask this process: a part of its readiness."""
        return True

    def server_problems(self) -> Iterator[str]:
        """What the engine's server lacks for the declared topics. Raises BrokerError."""
        return iter(())

    @abstractmethod
    def left(self, brokers: Sequence[str] = ()) -> LeftoverWork:
        """What the broker has not finished of the project's topics and groups, before a move to another broker.

        `brokers`: administration ports (HOST:PORT), for an engine that needs them. Raises BrokerError or UsageError.
        """


def _codec(where: str, dotted_path: str) -> Codec:
    made = imported(where, dotted_path)
    codec = made() if isinstance(made, type) else made
    if lacking := [name for name in ("content_type", "encode", "decode") if not hasattr(codec, name)]:
        raise ConfigurationError(
            f"{where} = {dotted_path!r} is not a codec, it has no {' and no '.join(lacking)}: see outbox.Codec."
        )
    return cast(Codec, codec)
