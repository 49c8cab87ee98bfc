"""An operator stops a Celery worker with `--outbox` by the action that stops any worker."""

from __future__ import annotations

import json

import pytest

from tests.celery.project import Project
from tests.support import eventually


@pytest.mark.slow
def test_a_celery_worker_that_is_asked_to_stop_shuts_down_warmly(shop: Project) -> None:
    worker, log = shop.worker("--outbox")
    eventually(shop.is_healthy, within_seconds=60, what="a worker that leads")

    def processes() -> list[dict[str, str]]:
        found: list[dict[str, str]] = json.loads(shop.shell("python manage.py outbox_process list --json"))
        return found

    [process] = eventually(processes, within_seconds=30, what="a consumer process")
    shop.shell(f"python manage.py outbox_process stop {process['process']} --no-input --reason 'a test'")
    assert worker.wait(60) == 0, log.read_text()
    said = log.read_text()
    assert "Warm shutdown" in said and "an operator asked to stop the worker" in said, said
    assert processes() == []
