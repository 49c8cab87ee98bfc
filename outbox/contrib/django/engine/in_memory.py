"""The in-memory broker in a TestCase: nothing commits there, so the ledger's rows show what would have committed."""

from __future__ import annotations

from django.db import connections

from outbox.contrib.django.database.transactions import in_transaction
from outbox.contrib.django.ledger import ledger
from outbox.contrib.django.ledger.ledger_checker import ledger_aliases
from outbox.contrib.django.settings.conf import get_settings
from outbox.memory import InMemoryBroker
from outbox.transaction import Decision, EndTransaction


def settle(broker: InMemoryBroker) -> None:
    """Decide every half message whose transaction has ended, by its ledger row, as check-back would."""
    connected = [connections[alias] for alias in ledger_aliases(usable=True)]
    undecided = broker.undecided()
    if not undecided or any(in_transaction(connection) for connection in connected):
        return
    committed = {transaction_id for connection in connected for transaction_id in ledger.states(connection, undecided)}
    group = get_settings().required_producer_group()
    broker.end(
        [
            EndTransaction(
                transaction_id=transaction_id,
                decision=Decision.COMMIT if transaction_id in committed else Decision.ROLLBACK,
                producer_group=group,
            )
            for transaction_id in undecided
        ]
    )
