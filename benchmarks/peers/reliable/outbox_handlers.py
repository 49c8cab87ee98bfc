"""The handler."""

from __future__ import annotations

import os

from reliable_outbox import Envelope, handler, inbox

from benchmarks.peers.record import handled


def paid(envelope: Envelope) -> None:
    handled(envelope.payload["number"])


handler("order.paid")(inbox.idempotent("bench")(paid) if os.environ["OUTBOX_BENCH_INBOX"] else paid)
