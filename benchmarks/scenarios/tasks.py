"""The tasks of procrastinate: the handler, and the pass over stalled jobs that its documents recommend."""

from __future__ import annotations

from typing import Any

from procrastinate import RetryStrategy
from procrastinate.contrib.django import app

from benchmarks.scenarios.contract import TAKEOVER_SECONDS
from benchmarks.scenarios.django_side import write_effect


@app.task(retry=RetryStrategy(max_attempts=20, wait=1))
def paid(order: int, padding: str) -> None:
    write_effect(order)


# The sixth field is the second.
@app.periodic(cron="* * * * * */3")
@app.task(queueing_lock="retry_stalled", pass_context=True)
async def retry_stalled(context: Any, timestamp: int) -> None:
    manager = context.app.job_manager
    for job in await manager.get_stalled_jobs(seconds_since_heartbeat=TAKEOVER_SECONDS):
        await manager.retry_job(job)
