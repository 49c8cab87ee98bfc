"""A broker in memory, for tests of applications. It has the protocol of the real broker, but no durability.

It passes the same contract suite as the PostgreSQL broker (tests/contract). It has no atomic path, because it has no
database to share a transaction with. It works within one process only.
"""

from outbox.memory.broker import InMemoryBroker
from outbox.memory.consumers import DeadLetter

__all__ = ["DeadLetter", "InMemoryBroker"]
