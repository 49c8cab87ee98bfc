"""Dead letters that keep the order: later messages of the same key wait until the dead letter is settled.
docs/blocked-keys.md is its page.

    INSTALLED_APPS = [..., "outbox.contrib.django", "outbox.contrib.blocked_keys"]

    @subscriber("account.changed", group="ledger", mode="key_ordered", max_suspends=5, options=[BlockKey()])
"""

from outbox.contrib.blocked_keys.declaration import BlockKey, KeyBlocked

__all__ = ["BlockKey", "KeyBlocked"]
