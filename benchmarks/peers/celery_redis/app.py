"""The application of `celery -A benchmarks.peers.celery_redis.app worker`, and its task."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from benchmarks.peers.record import handled

app = Celery(
    "bench",
    broker=f"redis+socket://{os.environ['OUTBOX_BENCH_REDIS']}",
    task_ignore_result=True,
    broker_connection_retry_on_startup=True,
)


@app.task
def paid(body: dict[str, Any]) -> None:
    handled(body["number"])
