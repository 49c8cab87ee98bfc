"""The handler of django-reliable-outbox."""

from __future__ import annotations

from reliable_outbox import Envelope, handler

from benchmarks.scenarios.django_side import write_effect


@handler("order.paid")
def paid(envelope: Envelope) -> None:
    write_effect(envelope.payload["order"])
