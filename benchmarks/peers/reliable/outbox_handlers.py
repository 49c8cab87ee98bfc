"""The handler: with the inbox and one model write, or without both."""

from __future__ import annotations

import os

from reliable_outbox import Envelope, handler, inbox

from benchmarks.peers import orm
from benchmarks.peers.record import handled

if os.environ["OUTBOX_BENCH_INBOX"]:

    @handler("order.paid")
    @inbox.idempotent("bench")
    def paid(envelope: Envelope) -> None:
        handled(envelope.payload["number"])
        orm.write_effect(envelope.payload["number"])

else:

    @handler("order.paid")
    def paid(envelope: Envelope) -> None:
        handled(envelope.payload["number"])
