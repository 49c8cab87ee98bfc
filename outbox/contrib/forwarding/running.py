"""Runs the groups of OUTBOX['FORWARD'] for `outbox_worker --role forward`. Each group sends messages to its sink."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, cast

from outbox import hooks
from outbox.broker.consumer.runtime import ConsumerRuntime
from outbox.codec import REFERENCE_CONTENT_TYPE
from outbox.contrib.django.database.aliases import broker_database
from outbox.contrib.django.database.in_tests import refuse_processes_in_tests
from outbox.contrib.django.engine.broker import engine_of
from outbox.contrib.django.operations.checks import warn_of_new_groups
from outbox.contrib.django.settings.conf import chosen, get_settings, imported, made, settings_of
from outbox.contrib.django.worker.workers import prepare_to_consume, wait_until_prepared
from outbox.contrib.forwarding.settings import DEAD_LETTER, DeclaredForward, ForwardSettings
from outbox.contrib.forwarding.sinks.formats import format_named
from outbox.contrib.forwarding.sinks.forwarder import Forwarder, RawCodecs, subscription
from outbox.contrib.forwarding.sinks.sink import Sink
from outbox.ports import AnyHandler, ConsumeCounts, Consumers
from outbox.subscription import Start, Subscription

_PURPOSE: Final = (
    "to forward: {'billing': {'topics': ['order.paid'], 'sink': 'webhook', "
    "'options': {'url': 'https://…', 'secrets': ['whsec_…']}}}"
)


def run_forward(stop: threading.Event, groups: Sequence[str] = ()) -> None:
    """Forward the messages of the given groups until `stop` is set, then finish the sends in progress.

    By default the function forwards the messages of all groups. While a database does not answer, the function waits.

    Raises ConfigurationError for a group that is not declared, or a sink that cannot be created. Raises the
    errors of `prepare_to_consume`.
    """
    refuse_processes_in_tests()
    with forwarding(groups=groups, stop=stop) as consumers:
        consumers.run(stop)


def forward_once(*, groups: Sequence[str] = ()) -> ConsumeCounts:
    """Send the messages that are queued now. Raises the errors of `run_forward`, and those of the databases."""
    with forwarding(groups=groups) as consumers:
        return consumers.run_once()


def forward_and_say(groups: Sequence[str]) -> str:
    """Do what `forward_once` does, and return the counts as a text."""
    sent = forward_once(groups=groups)
    return f"{sent.handled} messages forwarded, {sent.failed} attempts failed"


@contextlib.contextmanager
def forwarding(*, groups: Sequence[str] = (), stop: threading.Event | None = None) -> Iterator[Consumers]:
    """Make the consumers and the sinks of the groups. The sinks are closed at the end of the block.

    With `stop`, the function first waits until the databases answer. Without `stop`, it fails if one of them does not.
    """
    settings = get_settings()
    engine_of(settings).require()
    with contextlib.ExitStack() as stack:
        wanted: list[tuple[Subscription, AnyHandler]] = []
        declared_here = chosen("OUTBOX['FORWARD']", settings_of(ForwardSettings).forward, groups, _PURPOSE)
        for group, declared in declared_here.items():
            sink = _sink(f"OUTBOX['FORWARD'][{group!r}]", declared)
            stack.callback(sink.close)
            wanted += _subscriptions(group, declared, sink)
        if stop is None:
            prepare_to_consume()
        else:
            wait_until_prepared(stop)
        warn_of_new_groups([one.group for one, _ in wanted])
        yield ConsumerRuntime(
            broker_database(settings), wanted, codecs=RawCodecs(), lease_seconds=settings.lease_seconds
        )


def declared_groups() -> Mapping[str, Mapping[str, bool]]:
    """Return the groups of FORWARD with their topics, and whether the declaration names where the group begins."""
    declared = settings_of(ForwardSettings).forward
    return {group: dict.fromkeys(one.topics, one.start is not None) for group, one in declared.items()}


def _sink(where: str, declared: DeclaredForward) -> Sink:
    return cast(Sink, made(where, imported(f"{where}['sink']", declared.sink), declared.options))


def _subscriptions(group: str, declared: DeclaredForward, sink: Sink) -> Iterator[tuple[Subscription, AnyHandler]]:
    form = format_named(declared.format, binding=sink.binding, source=declared.source)
    stored = hooks.body_forms.get(REFERENCE_CONTENT_TYPE)
    unread = None if stored is None else hooks.resolved(stored.codec)(RawCodecs()).unread
    for topic, there in declared.topics.items():
        wanted = subscription(
            group,
            topic,
            sink,
            dead_letter=declared.on_rejected == DEAD_LETTER,
            filter=declared.filter,
            batch=declared.batch,
            threads=declared.threads,
            timeout_seconds=declared.timeout_seconds,
            suspend_seconds=declared.suspend_seconds,
            start=declared.start or Start.EARLIEST,
        )
        yield wanted, Forwarder(sink, there, form, unread)
