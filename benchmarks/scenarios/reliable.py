"""The adapter of django-reliable-outbox: its worker marks a message in the transaction of the handler."""

from __future__ import annotations

from benchmarks.scenarios import django_side
from benchmarks.scenarios.contract import System, main, number


def sender() -> django_side.Send:
    from reliable_outbox import publish

    return lambda order, padding: publish("order.paid", {"order": order, "padding": padding}, key=str(order))


SYSTEM = System(
    name="django-reliable-outbox",
    package="django-reliable-outbox",
    tables=("public.reliable_outbox_outboxmessage",),
    prepare=django_side.prepare,
    blocks=django_side.blocks(sender),
    worker=("-m", "django", "outbox_worker", "--concurrency", f"{number('WORKER_COUNT', 32):.0f}"),
)

if __name__ == "__main__":
    django_side.use("reliable")
    main(SYSTEM)
