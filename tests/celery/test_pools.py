"""End messages arrive from every pool that is let in, also when its processes come and go."""

from __future__ import annotations

import signal
import subprocess

import pytest

from tests.celery.project import Project
from tests.support import eventually

CALLS = 20
PAY = """
@shared_task
def pay_in_task(number):
    from shop.services import pay

    pay(number)
"""
SEND = f"""
from shop.tasks import pay_in_task
for number in range({CALLS}):
    pay_in_task.delay(str(number))
"""
on_sqlalchemy = pytest.mark.parametrize("shop", ["sqlalchemy"], indirect=True)


def _all_ends_arrive(shop: Project, *options: str) -> None:
    """No process runs check-back here: a half whose end is missing stays undecided."""
    shop.write("shop/tasks.py", PAY)
    shop.python(SEND)
    worker, log = shop.worker("--outbox-roles=broker", *options)
    # Each call publishes a message and a task.
    eventually(lambda: sum(shop.deciders().values()) == 2 * CALLS, within_seconds=80, what=log.read_text)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0, log.read_text()
    assert shop.deciders() == {"P": 2 * CALLS}
    assert "Traceback" not in log.read_text()


@pytest.mark.soak
@pytest.mark.parametrize("shop", ["redis"], indirect=True)
def test_ends_arrive_when_pool_processes_come_and_go(shop: Project) -> None:
    _all_ends_arrive(shop, "--pool=prefork", "--concurrency=5", "--max-tasks-per-child=1")


@pytest.mark.slow
@on_sqlalchemy
@pytest.mark.parametrize(
    "pool", [*(pytest.param(name, marks=pytest.mark.soak) for name in ("solo", "threads")), "gevent"]
)
def test_ends_arrive_from_every_pool(shop: Project, pool: str) -> None:
    if pool == "gevent":
        pytest.importorskip("gevent", reason="gevent is not installed")
    _all_ends_arrive(shop, f"--pool={pool}")


@on_sqlalchemy
@pytest.mark.slow
def test_eventlet_is_refused_at_start(shop: Project) -> None:
    done = subprocess.run(["pip", "show", "eventlet"], env=shop.environment(), capture_output=True, check=False)
    if done.returncode:
        pytest.skip("eventlet is not installed")
    worker, log = shop.worker("--pool=eventlet")
    assert worker.wait(60) == 1, log.read_text()
    said = log.read_text()
    assert "Error: outbox cannot work in the pool 'eventlet'" in said
    assert "Traceback" not in said
