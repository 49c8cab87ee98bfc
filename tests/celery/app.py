"""A small application for the Celery tests: a broker child, a consumer child, check-back by beat."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from celery import Celery

from outbox.broker import deaths
from outbox.broker.celery import beat, bootstep
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.postgres import PostgresBroker
from outbox.broker.supervisor import ChildSpec, Supervisor
from outbox.checkback import CheckBack
from outbox.transaction import Answer, Check, CheckSettings, Decision
from outbox.utils.periodic import PeriodicPass
from tests.celery.transport import transport

URL = os.environ["OUTBOX_BROKER_URL"]
GROUP = "shop"


class AlwaysCommitted:
    """The local transactions of this application all committed."""

    def check_local_transactions(self, checks: Sequence[Check]) -> Iterator[Answer]:
        for check in checks:
            yield Answer(transaction_id=check.transaction_id, decision=Decision.COMMIT)


def check_back() -> Mapping[str, Any]:
    broker = PostgresBroker(BrokerDatabase(conninfo=URL), check=CheckSettings(immunity_seconds=0))
    try:
        counts = CheckBack(broker, GROUP, AlwaysCommitted()).run_once()
    finally:
        broker.close()
    return {"committed": counts.committed}


CHILDREN = {
    "broker": ChildSpec(name="broker", argv=[sys.executable, "-m", "outbox.broker"]),
    "consumer": ChildSpec(
        name="consumer",
        argv=[sys.executable, "-m", "tests.celery.consumer_child"],
        on_death=functools.partial(deaths.record, BrokerDatabase(conninfo=URL)),
    ),
}


def supervisor(roles: Sequence[str], *, environment: Mapping[str, str]) -> Supervisor:
    drain_seconds = float(os.environ.get("OUTBOX_TEST_DRAIN_SECONDS", "20"))
    return Supervisor(
        [CHILDREN[role] for role in roles or CHILDREN], environment=environment, drain_seconds=drain_seconds
    )


app = Celery("outbox-tests", broker=transport(URL))
app.conf.worker_hijack_root_logger = False
app.conf.broker_connection_retry_on_startup = True
bootstep.install(app, supervisor, roles=lambda: list(CHILDREN))
beat.install(app, lambda: [PeriodicPass(name="check_back", run=check_back, interval_seconds=0.5)])
