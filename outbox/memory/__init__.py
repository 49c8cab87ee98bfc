"""A broker in the memory of one process, for tests of applications.

It passes the same contract suite as the PostgreSQL broker (tests/contract). It has no atomic path, because it has no
database in which the application's transaction could store messages.
"""

from outbox.memory.broker import InMemoryBroker
from outbox.memory.consumers import DeadLetter

__all__ = ["DeadLetter", "InMemoryBroker"]
