"""The option of a subscription whose dead letters block their keys, and the error of a message that waits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from outbox import names
from outbox.errors import ConfigurationError, PermanentError
from outbox.subscription import Effects, Mode, OnError, Subscription, SubscriptionOption


class KeyBlocked(PermanentError):
    """An earlier message of the same key is a dead letter, so this message waits among the dead letters.

    It is delivered when the earlier message is settled. The schema of the part knows this class by its name.
    """

    may_concern_body = False


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockKey(SubscriptionOption):
    """A dead letter blocks its key: later messages of the key wait, and messages of other keys continue.

    `limit`: if this number of the subscription's messages are dead letters or wait, the next message of a blocked key
    pauses the subscription instead.
    """

    limit: int = 10_000

    def __post_init__(self) -> None:
        if not names.is_whole(self.limit):
            raise ConfigurationError(
                f"BlockKey(limit={self.limit!r}): give a whole number from 1 to {names.MAX_INTEGER:,}."
            )

    def complaints(self, subscription: Subscription) -> Iterator[str]:
        """Yield why the dead letters of a subscription cannot block their keys."""
        if subscription.broadcast:
            yield "a broadcast group has no dead letters: remove BlockKey"
        if subscription.mode is Mode.CONCURRENT:
            yield "BlockKey keeps an order, and mode='concurrent' has none: use mode='key_ordered' or 'orderly'"
        if subscription.batch != 1:
            yield f"BlockKey needs batch=1, because a batch of {subscription.batch} may have two messages of one key"
        if subscription.effects is Effects.OUTSIDE:
            yield "BlockKey needs a handler in a transaction: remove effects='outside'"
        if subscription.reaction(KeyBlocked()) is not OnError.DEAD_LETTER:
            yield "a message that waits must become a dead letter: add KeyBlocked: 'dead_letter' to on_error"
        if OnError.RETRY_LATER in subscription.on_error.values():
            yield "on_error='retry_later' lets later messages pass, and BlockKey keeps their order: use 'retry'"
