"""The groups of this process and their subscriptions: plain data that all of dispatching uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from outbox.broker.groups.quarantine import QuarantinedMessage
from outbox.filters.filter import parse_filter
from outbox.ports import AnyHandler
from outbox.subscription import Mode, Subscription

_LEAST_FETCH: Final = 128
_MOST_FETCH: Final = 1000
# How far a queue is consumed beyond its lowest unfinished message: the most that is redelivered after a crash.
_SPAN: Final = {Mode.CONCURRENT: 4_000, Mode.ORDERLY: 4_000, Mode.KEY_ORDERED: 50_000}


@dataclass
class ConsumingGroup:
    """A consumer group in this process. `subscribed` is by topic id, and includes known retry queues.

    `paused`, `generation` (of the inbox) and `quarantined` (by log id) follow the database. The dispatching thread
    changes them.
    """

    group_id: int
    name: str
    broadcast: bool
    retry_queues: dict[int, int] = field(default_factory=dict)
    subscribed: dict[int, Subscribed] = field(default_factory=dict)
    paused: bool = False
    generation: int = 1
    quarantined: Mapping[int, QuarantinedMessage] = field(default_factory=dict)

    def subscribe(self, subscription: Subscription, handler: AnyHandler, topic_id: int) -> Subscribed:
        """Consume a topic for this group."""
        subscribed = self.subscribed[topic_id] = Subscribed(self, subscription, handler, topic_id)
        return subscribed


class Subscribed:
    """A subscription of this process: its handler, its filter, and how much of a queue to fetch for it."""

    __slots__ = ("fetch_size", "filter", "group", "handler", "key", "ordered", "span", "subscription")

    def __init__(self, group: ConsumingGroup, subscription: Subscription, handler: AnyHandler, topic_id: int) -> None:
        # (group id, topic id)
        self.key: Final = (group.group_id, topic_id)
        self.group: Final = group
        self.subscription: Final = subscription
        self.handler: Final = handler
        self.filter: Final = parse_filter(subscription.filter)
        self.ordered: Final = subscription.mode is not Mode.CONCURRENT
        self.fetch_size: Final = min(_MOST_FETCH, max(_LEAST_FETCH, 2 * subscription.batch))
        self.span: Final = _SPAN[subscription.mode]
