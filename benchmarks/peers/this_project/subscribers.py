"""The handler: by default with the inbox and one model write; without the inbox it only notes the call."""

from __future__ import annotations

import os

from benchmarks.peers import orm
from benchmarks.peers.record import handled
from benchmarks.peers.this_project.project import TOPIC
from outbox.contrib.django import subscriber
from outbox.message import Delivery

if os.environ["OUTBOX_BENCH_INBOX"]:

    @subscriber(TOPIC, group="bench")
    def paid(delivery: Delivery) -> None:
        handled(delivery.body["number"])
        orm.write_effect(delivery.body["number"])

else:

    @subscriber(TOPIC, group="bench", idempotent=False)
    def paid(delivery: Delivery) -> None:
        handled(delivery.body["number"])
