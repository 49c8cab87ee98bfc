"""A broker in memory, for tests of applications.

The in-memory broker has the protocol of the real broker, but stores nothing on disk.

The in-memory broker passes the same contract suite as the PostgreSQL broker (tests/contract). It has no atomic path,
because it has no database in which the application's transaction could store messages. An in-memory broker works within
one process only.
"""

from outbox.memory.broker import InMemoryBroker
from outbox.memory.consumers import DeadLetter

__all__ = ["DeadLetter", "InMemoryBroker"]
