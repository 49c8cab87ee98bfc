"""The adapter of procrastinate: `defer` on Django's connection, `manage.py procrastinate worker`."""

from __future__ import annotations

from benchmarks.scenarios import django_side
from benchmarks.scenarios.contract import System, main, number


def sender() -> django_side.Send:
    from benchmarks.scenarios.tasks import paid

    return lambda order, padding: paid.defer(order=order, padding=padding)


SYSTEM = System(
    name="procrastinate",
    package="procrastinate",
    tables=("public.procrastinate_jobs", "public.procrastinate_events"),
    prepare=django_side.prepare,
    blocks=django_side.blocks(sender),
    worker=("-m", "django", "procrastinate", "worker", "--concurrency", f"{number('WORKER_COUNT', 32):.0f}"),
)

if __name__ == "__main__":
    django_side.use("procrastinate_jobs")
    main(SYSTEM)
