"""Delivers handled messages again, for tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Final

from django.db import connections, transaction

from outbox.contrib.django.subscribers.inbox import handler_alias
from outbox.contrib.django.subscribers.outside import HandlerInvoker
from outbox.contrib.django.subscribers.registry import find_subscriber, subscriptions
from outbox.message import Delivery, afresh
from outbox.ports import AnyHandler, Disposition, call_handler
from outbox.subscription import Effects, Subscription

# The inbox generation of a group that no operator has reset.
_GENERATION: Final = 1
# Each of these generations has neither inbox rows nor steps.
_unused_generations: Final = itertools.count(_GENERATION + 1)


@dataclass(frozen=True, slots=True)
class HandledCall:
    """One call of a handler that has returned."""

    subscription: Subscription
    handler: AnyHandler
    deliveries: Sequence[Delivery]


def handled_call(handler: AnyHandler, given: Delivery | Sequence[Delivery]) -> HandledCall:
    """Describe a call of a registered handler. `given`: the argument of the handler."""
    deliveries = [given] if isinstance(given, Delivery) else list(given)
    wanted = (deliveries[0].group, deliveries[0].topic)
    [found] = [one for one, _ in subscriptions(groups=[wanted[0]]) if one.topic == wanted[1]]
    return HandledCall(found, handler, deliveries)


def deliver_again(calls: Iterable[HandledCall], *, bypass_inbox: bool = False) -> int:
    """Deliver the messages of these calls once more, and return how many messages a handler has got.

    The inbox skips a message that is handled. With `bypass_inbox`, each handler gets its messages again. The handler's
    transaction is then the same, but has no inbox row. A handler with effects="outside" gets a new claim, and its steps
    run again with the same keys, as after a reset of its group.

    Raises the first error of a handler.
    """
    handled = 0
    for call in list(calls):
        deliveries = [replace(one, attempt=one.attempt + 1) for one in afresh(call.deliveries)]
        for result in Context().run(_results, call, deliveries, bypass_inbox):
            if isinstance(result, Exception):
                raise result
            handled += result is Disposition.HANDLED
    return handled


def _results(call: HandledCall, deliveries: list[Delivery], bypass_inbox: bool) -> Sequence[Disposition | Exception]:
    registered = find_subscriber(call.subscription)
    if not bypass_inbox:
        return HandlerInvoker()(call.subscription, call.handler, deliveries, generation=_GENERATION)
    if registered is None or not registered.idempotent:
        return call_handler(call.subscription, call.handler, deliveries, generation=_GENERATION)
    if call.subscription.effects is Effects.OUTSIDE:
        generation = next(_unused_generations)
        return HandlerInvoker()(call.subscription, call.handler, deliveries, generation=generation)
    with transaction.atomic(using=connections[handler_alias(registered)].alias):
        results = call_handler(call.subscription, call.handler, deliveries, generation=_GENERATION)
        for result in results:
            if isinstance(result, Exception):
                raise result
    return results
