"""What runs periodically in a producer service: check-back, and pruning of ledger and inbox."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from outbox.broker.postgres import PostgresBroker
from outbox.broker.transaction.turns import CHECK_BACK
from outbox.checkback import CheckBack
from outbox.contrib.django.broker import get_broker
from outbox.contrib.django.conf import get_settings
from outbox.contrib.django.ledger_checker import LedgerChecker
from outbox.contrib.django.pruning import run_prune
from outbox.contrib.django.watching import audit_when_due
from outbox.errors import BrokerError
from outbox.periodic import PeriodicPass
from outbox.transaction import CheckCounts

logger = logging.getLogger(__name__)

PRUNE_INTERVAL_SECONDS: Final = 600.0


def run_check_back(*, max_batches: int = 100, parked: bool = False) -> CheckCounts:
    """Answer everything the broker asks this producer group now. Any number of processes may do so at once.

    `parked` asks about the group's parked transactions as well, whenever their turn would be. Raises
    ConfigurationError without PRODUCER_GROUP, and BrokerError when the broker cannot be asked.
    """
    _is_my_turn(CHECK_BACK, get_settings().check_interval_seconds, rest_seconds=0)
    if parked:
        get_broker().resume_checks(get_settings().required_producer_group())
    return _check_back(max_batches=max_batches)


def _check_back(*, max_batches: int = 100) -> CheckCounts:
    group = get_settings().required_producer_group()
    broker = get_broker()
    return CheckBack(broker, group, LedgerChecker()).run_once(max_batches=max_batches)


def passes() -> list[PeriodicPass]:
    """What has to run periodically in a producer service, whoever drives it: a worker's role "check", or Celery beat.

    Each runs when no other process of the service has just begun it. Without PRODUCER_GROUP there is no check-back:
    nothing can be published on the two-phase path.
    """
    settings = get_settings()
    prune = _in_turn("prune", PRUNE_INTERVAL_SECONDS, lambda: asdict(run_prune()))
    # Asked more often than it is due: workers come and go.
    audit_seconds = min(3600.0, settings.audit_interval_seconds)
    always = [prune, PeriodicPass(name="audit", interval_seconds=audit_seconds, run=audit_when_due)]
    if not settings.producer_group:
        return always
    return [_in_turn(CHECK_BACK, settings.check_interval_seconds, lambda: asdict(_check_back())), *always]


def _in_turn(name: str, interval_seconds: float, work: Callable[[], Mapping[str, Any]]) -> PeriodicPass:
    return PeriodicPass(name=name, interval_seconds=interval_seconds, run=partial(_run, name, interval_seconds, work))


def _run(name: str, interval_seconds: float, work: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    return work() if _is_my_turn(name, interval_seconds) else {"left_to": "another process, which has just begun it"}


def _is_my_turn(name: str, interval_seconds: float, *, rest_seconds: float | None = None) -> bool:
    """Also where that cannot be asked: a pass too many is harmless."""
    group, broker = get_settings().producer_group, get_broker()
    if not group or not isinstance(broker, PostgresBroker):
        return True
    try:
        return broker.take_turn(group, name, interval_seconds=interval_seconds, rest_seconds=rest_seconds)
    except BrokerError as error:
        logger.warning("whose turn %s is cannot be asked, it runs here: %s", name, error)
        return True
