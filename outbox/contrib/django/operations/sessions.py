"""Adds up the sessions that the workers of this project may open, and compares them with the limits of the servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final

import psycopg
from django.db import connections

from outbox.broker.database.executor import Executor
from outbox.broker.operations.sessions import Limit, consumer_processes, is_behind_pooler, limits
from outbox.contrib.django.database.aliases import database_at
from outbox.contrib.django.ledger.ledger_checker import ledger_aliases
from outbox.contrib.django.settings.conf import OutboxSettings
from outbox.contrib.django.subscribers.inbox import handler_sessions
from outbox.contrib.django.subscribers.registry import autodiscover
from outbox.errors import OutboxError

# The sessions of the broker's database that one worker opens, whatever it consumes: the broker process, passes, the
# summary, the leader's work for parts, check-back. They are rarely open together.
_OF_WORKER: Final = 4
# Each consumer process has a session that dispatches and one for the leases.
_OF_CONSUMER: Final = 2
# On the two-phase path, a publishing process has up to 8 sessions for messages and one for end messages.
_PUBLISHING: Final = 8


@dataclass(frozen=True, slots=True)
class Demand:
    """What one server may get from this project, beside what is open now.

    `of_worker`: the sessions of one worker. `workers`: the workers that run now, at least one. `open_elsewhere`: the
    open sessions beyond those of the running workers. `limit`: the tightest limit; None behind a pooler, whose server
    does not show which limits apply.
    """

    aliases: Sequence[str]
    of_worker: int
    workers: int
    open_elsewhere: int
    limit: Limit | None

    @property
    def is_too_much(self) -> bool:
        """Whether the server may refuse connections when the workers are busy."""
        return self.limit is not None and self.of_worker * self.workers + self.open_elsewhere > self.limit.allowed

    def __str__(self) -> str:
        where = f"on the server of {', '.join(map(repr, self.aliases))}"
        if self.limit is None:
            return (
                f"{where}: not examined behind a pooler; a worker of this project may open {self.of_worker} sessions "
                "(docs/operations/connections.md#pgbouncer)"
            )
        return (
            f"{where}, {self.workers} worker(s) of this project may open "
            f"{self.of_worker} sessions each, and other programs have {self.open_elsewhere} open now; "
            f"{self.limit.limit} allows {self.limit.allowed}"
        )


def demands(settings: OutboxSettings) -> Iterator[Demand]:
    """Return the demand at each PostgreSQL server of this project that answers."""
    handlers = handler_sessions(autodiscover())
    servers: dict[tuple[str, str], list[str]] = {}
    for alias in sorted({*handlers, *ledger_aliases(), settings.broker}):
        if alias in connections and connections[alias].vendor == "postgresql":
            entry = connections[alias].settings_dict
            servers.setdefault((str(entry["HOST"]), str(entry["PORT"])), []).append(alias)
    for aliases in servers.values():
        of_worker = settings.consumer_processes * sum(handlers.get(alias, 0) for alias in aliases)
        # Check-back and pruning look into each ledger during their passes.
        of_worker += sum(alias in ledger_aliases() for alias in aliases)
        if settings.broker in aliases and settings.has_database:
            of_consumer = _OF_CONSUMER
            if handlers.keys() - {settings.broker}:
                of_consumer += min(_PUBLISHING, max(handlers.values())) + 1
            of_worker += _OF_WORKER + of_consumer * settings.consumer_processes
        try:
            with closing(database_at(aliases[0], settings).open(name="outbox-check")) as connection:
                run = Executor(connection, settings.schema)
                if is_behind_pooler(run):
                    yield Demand(aliases, of_worker, 1, 0, None)
                    continue
                running = consumer_processes(run) // max(1, settings.consumer_processes)
                tightest = limits(run)[0]
        except (psycopg.Error, OutboxError):
            # Another check names a database that does not answer.
            continue
        yield Demand(aliases, of_worker, max(1, running), max(0, tightest.used - running * of_worker), tightest)
