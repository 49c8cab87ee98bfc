"""The interface of every engine on Django's side. Publishers, workers, checks and commands use this interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, cast
from uuid import UUID

from django.core.checks import CheckMessage
from django.db.backends.base.base import BaseDatabaseWrapper

from outbox import hooks
from outbox.broker.log.topics import TopicCatalog
from outbox.codec import Codec, Codecs
from outbox.contrib.django.settings.conf import OutboxSettings, imported
from outbox.errors import ConfigurationError
from outbox.message import Message, SendReceipt
from outbox.ports import AnyHandler, Broker, Consumers, LeftoverWork
from outbox.recall import Recall
from outbox.refusals import Refusals
from outbox.subscription import Subscription


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Messages of a publish call that an engine has stored as rows of the application's database.

    `are_there` says whether the open transaction still has the rows.
    """

    receipts: Mapping[UUID, SendReceipt]
    are_there: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class HeldQueue:
    """A queue with waiting messages. `holder` is the id of the queue and the id of the process that holds its lease."""

    holder: tuple[int, UUID]
    messages: int


class Engine(ABC):
    """One engine with its settings.

    Creating an engine opens no connection. If an engine does not need a method, the method does nothing.

    `has_broker_process`: whether a worker runs a broker process, which sequences messages. `pass_names`: further
    periodic passes that a producer service runs.
    """

    refusals: ClassVar[Refusals]
    has_broker_process: ClassVar[bool] = True
    pass_names: ClassVar[Sequence[str]] = ()

    def __init__(self, settings: OutboxSettings) -> None:
        self.settings = settings

    @cached_property
    @abstractmethod
    def broker(self) -> Broker:
        """The broker of this process (an implementation of `ports.Broker`). Raises ConfigurationError."""

    @cached_property
    def codecs(self) -> Codecs:
        """The default codec of this project, and the codecs of its topics. Raises ConfigurationError."""
        settings = self.settings
        default = None if settings.codec is None else _codec("OUTBOX['CODEC']", settings.codec)
        by_topic = {
            name: _codec(f"OUTBOX['TOPICS'][{name!r}]['codec']", declared.codec)
            for name, declared in settings.topics.items()
            if declared.codec is not None
        }
        codecs = Codecs(default, by_topic=by_topic)
        for form in hooks.body_forms.values():
            codecs.add(hooks.resolved(form.codec)(codecs))
        return codecs

    @cached_property
    def catalog(self) -> TopicCatalog:
        return TopicCatalog(self.settings.schema)

    @abstractmethod
    def check(self) -> Iterator[CheckMessage]:
        """The problems of the settings and declarations with this engine, for `manage.py check`."""

    def refused(self) -> Iterator[str]:
        """One text for each declaration that this engine refuses, with an alternative. Raises ConfigurationError."""
        return iter(())

    def require(self) -> None:
        """Raise ConfigurationError for the first refused declaration."""
        for text in self.refused():
            raise ConfigurationError(text)

    @abstractmethod
    def consumers(self, wanted: Sequence[tuple[Subscription, AnyHandler]], *, leads: bool = False) -> Consumers:
        """The consumers that run these subscriptions in this process.

        `leads`: the process also runs the leader, which sequences messages, if the engine has a leader.

        Raises ConfigurationError.
        """

    def sequence(self) -> int:
        """Put all decided messages into their queues now, and return their number. Raises BrokerError."""
        return 0

    def decide_ended(self) -> int:
        """In a test on the in-memory broker: decide the half messages that no commit decides. Returns their number."""
        return 0

    def run_pass(self, name: str) -> Mapping[str, Any]:
        """Run one of `pass_names` and return its counts. Raises BrokerError."""
        raise NotImplementedError(name)

    def is_asked(self) -> bool:
        """Whether check-back can reach this process.

        A process that check-back cannot reach does not report that it is ready.
        """
        return True

    def store_rows(self, connection: BaseDatabaseWrapper, messages: Sequence[Message]) -> StoredRows | None:
        """Store those messages of an open transaction that this engine cannot store as half messages, if there are any.

        `publish` calls this method on the two-phase path, before it stores the other messages as half messages. An
        error marks the transaction for rollback.
        """
        return None

    def recall_row(self, message_id: UUID) -> Recall | None:
        """Recall a message that `store_rows` has stored and that was not sent. Returns None if there is no such row."""
        return None

    def server_problems(self) -> Iterator[str]:
        """One text for each problem of the engine's server with the declared topics. Raises BrokerError."""
        return iter(())

    def held_elsewhere(self) -> Sequence[HeldQueue]:
        """The queues with messages for this project's groups that other consumer processes hold. Raises BrokerError.

        The process that holds a queue may be dead; then its lease expires.
        """
        return ()

    @abstractmethod
    def leftover_work(self) -> LeftoverWork:
        """The unfinished work of the project's topics and groups, to be checked before a move to another broker.

        Raises BrokerError or UsageError.
        """


def _codec(where: str, dotted_path: str) -> Codec:
    made = imported(where, dotted_path)
    codec = made() if isinstance(made, type) else made
    if lacking := [name for name in ("content_type", "encode", "decode") if not hasattr(codec, name)]:
        raise ConfigurationError(
            f"{where} = {dotted_path!r} is not a codec, because it has no {' and no '.join(lacking)}: see outbox.Codec."
        )
    return cast(Codec, codec)
