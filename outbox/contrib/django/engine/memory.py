"""The in-memory engine, for tests.

In a TestCase no transaction commits, so this engine reads from the ledger rows which transactions would have committed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import ClassVar

from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Warning
from django.db import connections

from outbox.contrib.django.database.django_internals import running_tests
from outbox.contrib.django.database.transactions import in_test_case, in_transaction
from outbox.contrib.django.engine.engine import Engine
from outbox.contrib.django.ledger import ledger
from outbox.contrib.django.ledger.ledger_checker import LedgerChecker, ledger_aliases
from outbox.contrib.django.subscribers.outside import HandlerInvoker
from outbox.memory import InMemoryBroker
from outbox.memory.consumers import InMemoryConsumers
from outbox.ports import AnyHandler, LeftoverWork
from outbox.refusals import Refusal, Refusals
from outbox.subscription import Subscription
from outbox.transaction import Decision, EndTransaction


class MemoryEngine(Engine):
    """The engine for OUTBOX['IN_MEMORY']: messages exist only in this process."""

    refusals: ClassVar[Refusals] = Refusals(
        "in memory (OUTBOX['IN_MEMORY'])",
        calls={
            "install": Refusal("tables: the broker exists only inside this process", "There is nothing to install."),
            "left": Refusal("messages of another process", "Turn IN_MEMORY off to look into a broker."),
        },
    )

    @cached_property
    def broker(self) -> InMemoryBroker:
        settings = self.settings
        return InMemoryBroker(
            [declared.topic for declared in settings.topics.values()],
            auto_create_topics=not settings.topics,
            codecs=self.codecs,
            invoker=HandlerInvoker(lease_seconds=settings.lease_seconds),
            check=settings.check,
        )

    def check(self) -> Iterator[CheckMessage]:
        if not django_settings.DEBUG and not running_tests():
            yield Warning(
                "OUTBOX['IN_MEMORY'] is on: messages exist only in this process and are lost when the process ends.",
                hint="Use IN_MEMORY in tests only.",
                id="outbox.W011",
            )

    def consumers(self, wanted: Sequence[tuple[Subscription, AnyHandler]], *, leads: bool = False) -> InMemoryConsumers:
        return InMemoryConsumers(self.broker.groups, wanted)

    def decide_ended(self) -> int:
        """Decide each half message whose transaction has ended.

        As in check-back, the ledger row gives the decision.
        """
        aliases = ledger_aliases(usable=True)
        connected = [connections[alias] for alias in aliases]
        undecided = self.broker.undecided()
        if not undecided or any(in_transaction(connection) for connection in connected):
            return 0
        if any(in_test_case(connection) for connection in connected):
            # Only the connections of the TestCase see its ledger rows.
            ids = [check.transaction_id for check in undecided]
            committed = {one for connection in connected for one in ledger.states(connection, ids)}
            decisions = {one: Decision.COMMIT if one in committed else Decision.ROLLBACK for one in ids}
        else:
            # A transaction of another thread may still be open.
            answers = LedgerChecker(aliases).check_local_transactions(undecided)
            decisions = {one.transaction_id: one.decision for one in answers if one.decision is not Decision.UNKNOWN}
        group = self.settings.required_producer_group()
        self.broker.end(
            [
                EndTransaction(transaction_id=transaction_id, decision=decision, producer_group=group)
                for transaction_id, decision in decisions.items()
            ]
        )
        return len(decisions)

    def leftover_work(self) -> LeftoverWork:
        self.refusals.refuse("left", "what is left")
