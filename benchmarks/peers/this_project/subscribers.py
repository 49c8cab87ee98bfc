"""The handler."""

from __future__ import annotations

import os

from benchmarks.peers.record import handled
from benchmarks.peers.this_project.project import TOPIC
from outbox.contrib.django import subscriber
from outbox.message import Delivery


@subscriber(TOPIC, group="bench", idempotent=bool(os.environ["OUTBOX_BENCH_INBOX"]))
def paid(delivery: Delivery) -> None:
    handled(delivery.body["number"])
