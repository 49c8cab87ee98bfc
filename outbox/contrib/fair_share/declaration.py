"""The option of a subscription whose messages are handled in turn: one of each tenant that has messages waiting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from outbox import names
from outbox.errors import ConfigurationError, InvalidName
from outbox.subscription import Mode, Subscription, SubscriptionOption


@dataclass(frozen=True, kw_only=True, slots=True)
class FairShare(SubscriptionOption):
    """The next message is one of the tenant that has waited longest for its turn.

    `header`: the tenant of a message is the value of this header. `key_prefix`: it is the beginning of the key, up to
    this text, or the whole key if the text is not in it. Give one of the two. All messages without the header, or
    without a key, count as one tenant.
    """

    header: str | None = None
    key_prefix: str | None = None

    def __post_init__(self) -> None:
        if (self.header is None) == (self.key_prefix is None):
            raise ConfigurationError(
                f"{self!r} does not say what the tenant of a message is: give either header, as in "
                "FairShare(header='tenant'), or key_prefix, as in FairShare(key_prefix=':')."
            )
        given = self.header if self.key_prefix is None else self.key_prefix
        if not isinstance(given, str) or not given or not names.is_text(given):
            raise ConfigurationError(f"{self!r}: give a text, as in FairShare(header='tenant').")
        if self.header is not None:
            try:
                names.check_headers({self.header: ""})
            except InvalidName as error:
                raise ConfigurationError(f"{self!r}: {error}") from error

    def complaints(self, subscription: Subscription) -> Iterator[str]:
        """Yield why a subscription cannot take its messages in turn."""
        if subscription.mode is not Mode.CONCURRENT:
            yield (
                f"FairShare lets messages overtake others, and mode={subscription.mode.value!r} keeps an order: use "
                "mode='concurrent'"
            )
        elif subscription.batch != 1:
            yield (
                f"FairShare needs batch=1, because a batch of {subscription.batch} has messages of several tenants in "
                "one transaction"
            )

    @property
    def has_lane(self) -> bool:
        """Whether the messages wait in the lane of this part: yes."""
        return True
