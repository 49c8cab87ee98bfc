"""The adapter of this project: `publish` in the transaction, `manage.py outbox_worker`, the inbox on (the default)."""

from __future__ import annotations

from benchmarks.scenarios import django_side
from benchmarks.scenarios.contract import System, main


def sender() -> django_side.Send:
    from outbox.contrib.django import publish

    return lambda order, padding: publish("order.paid", {"order": order, "padding": padding}, key=order)


SYSTEM = System(
    name="this project",
    package="outbox-transactional",
    tables=("outbox.commit_log", "outbox.op_log", "outbox.consume_queue", "outbox.consumer_offset"),
    prepare=django_side.prepare,
    blocks=django_side.blocks(sender),
    worker=("-m", "django", "outbox_worker"),
)

if __name__ == "__main__":
    django_side.use("this_project")
    main(SYSTEM)
