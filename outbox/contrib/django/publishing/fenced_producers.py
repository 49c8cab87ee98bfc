"""A fenced producer has at most one active instance: a new one takes over its transactional id, and fences the older.

    importer = fenced_producer("nightly-import")
    importer.publish_messages([message("points.earned", {"points": 5}, key=4)], at_once=True)

In Kafka, an open transaction is open in the broker, and readers stop before it until its timeout. Here a transaction
without a local one is stored by one statement, so it is never undecided.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final

from outbox import names
from outbox.contrib.django.engine.broker import get_broker, get_engine
from outbox.contrib.django.publishing.checkback import run_check_back
from outbox.contrib.django.publishing.publish import errors_roll_back_the_block, messages_of, publish_bound
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import LeftoversUndecided, UsageError
from outbox.message import Message, SendReceipt
from outbox.transaction import ProducerEpoch
from outbox.utils.backoff import Backoff

_BACKOFF: Final = Backoff(first_seconds=0.05, longest_seconds=1.0, factor=2)


class FencedProducer:
    """The newest instance of a producer with a transactional id; made by `fenced_producer`.

    Threads may share the object.
    """

    def __init__(self, instance: ProducerEpoch) -> None:
        self.instance: Final = instance

    def publish_messages(
        self, messages: Sequence[Message], *, using: str | None = None, at_once: bool = False
    ) -> list[SendReceipt]:
        """Like `publish_messages` of outbox.contrib.django. Raises ProducerFenced if a newer instance exists."""
        with errors_roll_back_the_block(using):
            given = messages_of(messages, "publish_messages")
            return list(publish_bound(given, using=using, at_once=at_once, producer=self.instance).receipts)


def fenced_producer(transactional_id: str, *, wait_seconds: float = 30.0) -> FencedProducer:
    """Take over `transactional_id` within this service's PRODUCER_GROUP.

    Call this function once, when the process starts. After this call, the broker refuses older instances. Before it
    returns, the function decides the undecided transactions of older instances by check-backs, which do not wait for
    immunity. The function takes at most `wait_seconds`. If such transactions are still undecided after this time, the
    function raises LeftoversUndecided: an older instance has not ended its transaction, or no process can answer the
    checks. The text of this error says whether the older instances are fenced.
    """
    names.check_group(transactional_id)
    if not names.is_seconds(wait_seconds):
        raise UsageError(
            f"fenced_producer({transactional_id!r}): wait_seconds={wait_seconds!r} must be a number of seconds, 0 or "
            f"more and at most {names.MAX_WAIT_SECONDS:,} (24 days)."
        )
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
                    f"are undecided after {wait_seconds:g} s; the first transaction is {left[0]}. `manage.py "
                    f"outbox_message show {left[0]}` shows the answers of its checks; a local transaction that is "
                    "still open must end first. The older instances are fenced. Call fenced_producer() again."
                )
            pause.wait(pause_seconds)
        # In a TestCase no transaction commits, so check-back would wait for its end.
        get_engine().decide_ended()
        run_check_back()
        rounds += 1
    return FencedProducer(instance)
