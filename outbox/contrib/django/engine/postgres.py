"""The engine of the bundled broker in PostgreSQL.

Code that only workers and commands run is imported inside the functions that use it.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Final

from django.core.checks import CheckMessage, Error

from outbox.broker.database.executor import Executor
from outbox.broker.postgres import PostgresBroker
from outbox.broker.schema.refusals import naming
from outbox.contrib.django.database.aliases import alias_conninfo, broker_database, database_of, on_broker
from outbox.contrib.django.engine.engine import Engine, HeldQueue
from outbox.contrib.django.subscribers.registry import subscribers
from outbox.errors import ConfigurationError
from outbox.ports import AnyHandler, Consumers, LeftoverWork
from outbox.refusals import Refusals
from outbox.subscription import Subscription

if TYPE_CHECKING:
    from outbox.broker.operations.audit import MessageCounts

# Terms of the audit, of a topic and of a group. Running workers finish the messages of _MOVING. An operator must settle
# the messages of _STUCK.
_MOVING: Final = (("undecided", "unsequenced", "held", "scheduled"), ("lag", "claimed", "retrying"))
_STUCK: Final = (("parked",), ("dead",))
_WORDS: Final = {"unsequenced": "not queued yet", "lag": "not handled"}


class PostgresEngine(Engine):
    """The engine for a broker in the database of the alias OUTBOX['BROKER']. This engine accepts every declaration."""

    refusals: ClassVar[Refusals] = Refusals("PostgreSQL")

    @cached_property
    def broker(self) -> PostgresBroker:
        return PostgresBroker(database_of(self.settings), catalog=self.catalog, check=self.settings.check)

    def check(self) -> Iterator[CheckMessage]:
        try:
            alias_conninfo(self.settings.broker)
        except ConfigurationError as error:
            yield Error(str(error), id="outbox.E002")

    def consumers(self, wanted: Sequence[tuple[Subscription, AnyHandler]], *, leads: bool = False) -> Consumers:
        from outbox.broker.consumer.runtime import ConsumerRuntime
        from outbox.broker.leading import LeaderSettings, LeadingConsumer
        from outbox.contrib.django.subscribers.outside import HandlerInvoker, claims_seconds

        settings = self.settings
        database = broker_database(settings)
        invoker = HandlerInvoker(
            lease_seconds=settings.lease_seconds, masked_fields=settings.masked_fields, has_generations=True
        )
        return ConsumerRuntime(
            database,
            wanted,
            invoker=invoker,
            share=invoker.share,
            claim=invoker.claim,
            claims_seconds=claims_seconds(settings.lease_seconds),
            sharing_calls=settings.messages_per_commit,
            threads=settings.handler_threads,
            codecs=self.codecs,
            lease_seconds=settings.lease_seconds,
            session_task=LeadingConsumer(database, settings=LeaderSettings(check=settings.check)) if leads else None,
        )

    def sequence(self) -> int:
        from outbox.broker.leading import Sequencer

        database = broker_database(self.settings)
        sequencer, queued = Sequencer(database, uuid.uuid4()), 0
        with closing(database.connect(name="outbox-drain")) as connection, naming("sequencing", database.schema):
            while (tick := sequencer.run_once(connection)).ticked or tick.more:
                queued += tick.appended
        return queued

    def held_elsewhere(self) -> Sequence[HeldQueue]:
        from outbox.broker.operations.progress import list_queues

        groups = {item.subscription.group for item in subscribers()}
        queues = on_broker(list_queues)
        return [
            HeldQueue((queue.queue_id, queue.owner), queue.lag)
            for queue in queues
            if queue.group in groups and queue.lag and queue.owner and not (queue.paused or queue.stopped)
        ]

    def leftover_work(self) -> LeftoverWork:
        from outbox.broker.operations.audit import count_messages
        from outbox.broker.schema.install import check_schema

        with (
            broker_database(self.settings).connect(name="outbox-left") as connection,
            naming("counting the messages on the broker", self.settings.schema),
        ):
            check_schema(connection, self.settings.schema)
            counted = count_messages(Executor(connection, self.settings.schema))
        topics = {*self.settings.topics, *(item.subscription.topic for item in subscribers())}
        groups = {item.subscription.group for item in subscribers()}
        waiting, staying = (list(_unfinished(counted, kinds, topics, groups)) for kinds in (_MOVING, _STUCK))
        return LeftoverWork(waiting=waiting, staying=staying)


def undelivered(counted: MessageCounts) -> Iterator[str]:
    """One text for each kind of unfinished messages of a topic or group."""
    groups = {group.name for group in counted.groups.values()}
    for kinds in (_MOVING, _STUCK):
        yield from _unfinished(counted, kinds, counted.topics, groups)


def _unfinished(
    counted: MessageCounts,
    kinds: tuple[Sequence[str], Sequence[str]],
    topics: Collection[str],
    groups: Collection[str],
) -> Iterator[str]:
    totals = [("topic", name, found, kinds[0]) for name, found in counted.topics.items() if name in topics]
    for group in counted.groups.values():
        if group.name in groups and not group.broadcast:
            totals.append(("group", group.name, group, kinds[1]))
    for what, name, found, fields in totals:
        for field in fields:
            if number := getattr(found, field):
                yield f"{what} {name!r} has {number} messages {_WORDS.get(field, field)}"
