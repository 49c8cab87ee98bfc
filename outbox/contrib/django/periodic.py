"""What runs periodically in a producer service: check-back, and pruning of ledger and inbox."""

from __future__ import annotations

from dataclasses import asdict

from outbox.checkback import CheckBack
from outbox.contrib.django.broker import get_broker
from outbox.contrib.django.conf import get_settings
from outbox.contrib.django.ledger_checker import LedgerChecker
from outbox.contrib.django.pruning import run_prune
from outbox.contrib.django.watching import audit_when_due
from outbox.periodic import PeriodicPass
from outbox.transaction import CheckCounts


def run_check_back(*, max_batches: int = 100) -> CheckCounts:
    """Answer everything the broker asks this producer group now. Any number of processes may do so at once.

    Raises ConfigurationError without PRODUCER_GROUP, and BrokerError when the broker cannot be asked.
    """
    group = get_settings().required_producer_group()
    return CheckBack(get_broker(), group, LedgerChecker()).run_once(max_batches=max_batches)


def passes() -> list[PeriodicPass]:
    """What has to run periodically in a producer service (Celery beat, or `outbox_worker --role check`)."""
    return [
        PeriodicPass(
            name="check_back",
            interval_seconds=get_settings().check_interval_seconds,
            run=lambda: asdict(run_check_back()),
        ),
        PeriodicPass(name="prune", interval_seconds=600.0, run=lambda: asdict(run_prune())),
        # Asked more often than it is due: workers come and go.
        PeriodicPass(
            name="audit", interval_seconds=min(3600.0, get_settings().audit_interval_seconds), run=audit_when_due
        ),
    ]
