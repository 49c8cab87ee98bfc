"""A producer with at most one active instance: an instance that takes over its id fences the older ones."""

from __future__ import annotations

import threading
import time
from typing import Final

from outbox import names
from outbox.contrib.django.engine.broker import get_broker
from outbox.contrib.django.publishing.checkback import run_check_back
from outbox.contrib.django.publishing.message_transactions import DEFAULT_TIMEOUT_SECONDS, MessageTransaction
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import LeftoversUndecided
from outbox.transaction import ProducerEpoch
from outbox.utils.backoff import Backoff

_BACKOFF: Final = Backoff(first_seconds=0.05, longest_seconds=1.0, factor=2)


class FencedProducer:
    """The newest instance of a logical producer; made by `fenced_producer`. Threads may share it."""

    def __init__(self, instance: ProducerEpoch) -> None:
        self.instance: Final = instance

    def transaction(
        self, *, using: str | None = None, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    ) -> MessageTransaction:
        """Like `message_transaction()`; leaving it raises ProducerFenced if there is a newer instance."""
        return MessageTransaction(using=using, timeout_seconds=timeout_seconds, producer=self.instance)


def fenced_producer(transactional_id: str, *, wait_seconds: float = 30.0) -> FencedProducer:
    """Take over `transactional_id` within this service's PRODUCER_GROUP; call it once, when the process starts.

    From then on older instances are refused. Their undecided transactions are settled first, by check-backs that do not
    wait for immunity, for at most `wait_seconds`. Raises LeftoversUndecided if that was not enough: an older instance
    is still inside its transaction, or no process can answer. The older instances are fenced then, too, unless the
    message says otherwise.
    """
    names.check_group(transactional_id)
    group = get_settings().required_producer_group()
    deadline = time.monotonic() + wait_seconds
    broker = get_broker()
    instance = broker.take_over(group, transactional_id, timeout_seconds=wait_seconds)
    pause = threading.Event()
    rounds = 0
    while left := broker.leftovers(instance):
        if rounds:
            pause_seconds = _BACKOFF.pause_seconds(rounds)
            if time.monotonic() + pause_seconds >= deadline:
                raise LeftoversUndecided(
                    f"producer {transactional_id!r} of group {group!r}: {len(left)} transactions of older instances "
                    f"are undecided after {wait_seconds:g} s, the first is {left[0]}. `manage.py outbox_message show "
                    f"{left[0]}` shows the answers of its checks; a local transaction that is still running must end "
                    "first. The older instances are fenced; call this again."
                )
            pause.wait(pause_seconds)
        run_check_back()
        rounds += 1
    return FencedProducer(instance)
