"""Dead letters that keep the order: later messages of the same key wait until the dead letter is settled.
docs/order-and-delay.md#dead-letters-that-keep-the-order describes them.

    INSTALLED_APPS = [..., "outbox.contrib.django", "outbox.contrib.blocked_keys"]

    @subscriber("account.changed", group="ledger", mode="key_ordered", max_suspends=5, options=[BlockKey()])
"""

from outbox.contrib.blocked_keys.declaration import BlockKey, KeyBlocked

__all__ = ["BlockKey", "KeyBlocked"]
