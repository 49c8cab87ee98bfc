"""A broker in memory, for tests of applications: the protocol of the real one, without durability.

It passes the same contract suite as the PostgreSQL broker (tests/contract). It has no atomic path, since
it has no database to share a transaction with, and it lives in one process.
"""

from outbox.memory.broker import InMemoryBroker
from outbox.memory.consumers import DeadLetter

__all__ = ["DeadLetter", "InMemoryBroker"]
