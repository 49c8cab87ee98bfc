"""Check-back of this service's producer group, and the choice of the process that runs a periodic pass now."""

from __future__ import annotations

import logging

from outbox.broker.transaction.turns import CHECK_BACK
from outbox.checkback import CheckBack
from outbox.contrib.django.engine.broker import get_broker
from outbox.contrib.django.ledger.ledger_checker import LedgerChecker
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import BrokerError, BrokerUnavailable
from outbox.transaction import CheckCounts
from outbox.utils import heartbeat

logger = logging.getLogger(__name__)


def run_check_back(*, max_batches: int = 100) -> CheckCounts:
    """Answer all due checks of this producer group now. Several processes may call this function at the same time.

    Raises ConfigurationError if PRODUCER_GROUP is not set, and BrokerError if the broker does not answer.
    """
    is_my_turn(CHECK_BACK, get_settings().check_interval_seconds, rest_seconds=0)
    return check_back(max_batches=max_batches)


def check_back(*, max_batches: int = 100) -> CheckCounts:
    """Run one pass of check-back, even if another process should run the next pass.

    Raises the errors of `run_check_back`.
    """
    group = get_settings().required_producer_group()
    broker = get_broker()
    return CheckBack(broker, group, LedgerChecker()).run_once(max_batches=max_batches)


def is_my_turn(name: str, interval_seconds: float, *, rest_seconds: float | None = None) -> bool:
    """Return whether this process should run the periodic pass `name` now.

    If the broker answers True, it has recorded the start of the pass. If the broker does not answer, or PRODUCER_GROUP
    is not set, the function also returns True; an extra pass is harmless.
    """
    group, broker = get_settings().producer_group, get_broker()
    if not group:
        return True
    try:
        is_mine = broker.take_turn(group, name, interval_seconds=interval_seconds, rest_seconds=rest_seconds)
        heartbeat.reached(True)
        return is_mine
    except BrokerError as error:
        heartbeat.reached(not isinstance(error, BrokerUnavailable))
        logger.warning(
            "the broker does not answer which process should run %s, so this process runs it: %s", name, error
        )
        return True
