"""Which processes a worker of a project starts."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.celery.project import Project
from tests.support import eventually

SPECS = """
from django.conf import settings
from django.test.utils import override_settings
from outbox.contrib.django.worker.roles import child_specs

def say():
    for roles in [(), ("broker",), ("check",), ("check", "broker"), ("consumer",)]:
        try:
            print(*roles, "->", *(f"{spec.name}({','.join(spec.argv[3:])})" for spec in child_specs(roles)))
        except Exception as error:
            print(*roles, "->", type(error).__name__)

say()
with override_settings(OUTBOX={**settings.OUTBOX, "CONSUMER_PROCESSES": 2}):
    say()
"""


def test_roles_choose_the_processes(shop: Project) -> None:
    """Of several consumers the broker process leads; it starts one of them for each of the two."""
    lines = shop.python(SPECS).splitlines()
    assert lines[:5] == [
        "-> broker(broker,check,--shared-lead) consumer-1(consumer,--shared-lead)",
        "broker -> broker(broker)",
        "check -> check(check)",
        "check broker -> broker(broker,check)",
        "consumer -> consumer-1(consumer)",
    ]
    assert "consumer-1(consumer)" in lines[5] and "--shared-lead" not in "".join(lines[5:])


def test_without_subscribers_there_is_no_consumer(shop: Project) -> None:
    """It would end and be started again for ever; the command that asks for one gets an error."""
    (shop.folder / "shop" / "subscribers.py").unlink()
    shop.write("shop/settings.py", "del OUTBOX['CELERY_APP']\n")
    (shop.folder / "shop" / "tasks.py").write_text("")
    (shop.folder / "shop" / "services.py").write_text("")
    lines = shop.python(SPECS).splitlines()
    assert (lines[0], lines[4]) == ("-> broker(broker,check)", "consumer -> ConfigurationError")


@pytest.mark.slow
def test_migrating_fresh_databases_warns_of_nothing(shop: Project, new_database: object) -> None:
    assert callable(new_database)
    shop.database_url, shop.outbox_url = new_database(), new_database()
    said = shop.shell("python manage.py migrate -v0\npython manage.py migrate -v0 --database=broker")
    assert said == ""


@pytest.mark.slow
def test_a_second_interrupt_ends_a_worker_without_celery_at_once(shop: Project) -> None:
    """Its handler runs for longer than this test may, and so may the drain."""
    shop.write("shop/settings.py", "OUTBOX |= {'DRAIN_SECONDS': 600, 'LEASE_SECONDS': 600}\n")
    begun = shop.folder / "begun"
    path = shop.folder / "shop" / "subscribers.py"
    path.write_text(f"{path.read_text()}    open({str(begun)!r}, 'w').close()\n    __import__('time').sleep(600)\n")
    shop.python("from shop.services import pay; pay('A-1')")
    worker, log = shop.start("python", "manage.py", "outbox_worker")
    eventually(begun.exists, within_seconds=60, what=log.read_text)
    children = Path(f"/proc/{worker.pid}/task")
    pids = [int(pid) for task in children.iterdir() for pid in (task / "children").read_text().split()]
    worker.send_signal(signal.SIGINT)
    eventually(lambda: "draining children" in log.read_text(), what=log.read_text)
    worker.send_signal(signal.SIGINT)
    assert worker.wait(60) == 128 + signal.SIGINT, log.read_text()
    assert "Traceback" not in log.read_text()
    assert len(pids) == 2
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), what="the children's end")
