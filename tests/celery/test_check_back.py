"""Check-back is there however a worker was started, and beat drives it where no worker has `--outbox`."""

from __future__ import annotations

import json

import pytest

from tests.celery.project import Project
from tests.part_apps import has, part_apps
from tests.support import eventually

# Apps with a pass of their own, and the names of these passes.
PARTS = part_apps("saga", "schedules")
PASSES_OF_PARTS = [name for app, name in (("saga", "outbox.sagas"), ("schedules", "outbox.schedules")) if has(app)]
WITH_PARTS = f"INSTALLED_APPS += {PARTS!r}\n"

LOST_END = "from shop.services import pay; pay('A-1')"
BLOCKER = """
import pathlib
import time

import celery
from shop.celery import app


class Early(celery.Task):  # finalises the app
    name = "early"

    def run(self):
        pass


app.register_task(Early())


@app.task
def block(path):
    pathlib.Path(path).write_text("running")
    while pathlib.Path(path).exists():
        time.sleep(0.05)
"""
# Before the app is wired, as where a module of tasks is imported by it.
EARLY = "app.autodiscover_tasks()\n"


def _finalise_early(shop: Project) -> None:
    path = shop.folder / "shop" / "celery.py"
    text = path.read_text()
    assert EARLY in text
    path.write_text(text.replace(EARLY, f"{EARLY}import shop.blocker  # noqa\n"))
    shop.write("shop/blocker.py", BLOCKER)


def lose_an_end(shop: Project) -> None:
    """Two halves, both committed, neither reported."""
    shop.python(LOST_END, OUTBOX_FAULTS="producer.before_end=raise")
    assert "P" not in shop.deciders()


@pytest.mark.parametrize("shop", ["sqlalchemy"], indirect=True)
@pytest.mark.slow
def test_a_worker_asks_back_without_beat_queue_or_pool(shop: Project) -> None:
    """The one slot of the pool is taken, there is no beat, and no queue may be made."""
    _finalise_early(shop)
    shop.write("shop/settings.py", "CELERY_TASK_CREATE_MISSING_QUEUES = False\n")
    busy = shop.folder / "busy"
    shop.python(f"from shop.blocker import block; block.delay({str(busy)!r})")
    _, log = shop.worker("--outbox")
    eventually(busy.exists, within_seconds=60, what=log.read_text)
    lose_an_end(shop)
    eventually(lambda: shop.deciders() == {"K": 2}, within_seconds=40, what=log.read_text)
    assert busy.exists()
    busy.unlink()


SCHEDULE = """
import json
from shop.celery import app
app.loader.init_worker()  # as worker and beat do
app.finalize()
print(json.dumps([sorted(name for name in app.tasks if name.startswith("outbox.")), app.conf.beat_schedule]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "early",
    [pytest.param(True, id="finalised before"), pytest.param(False, id="finalised after")],
)
def test_passes_are_there_however_early_the_app_is_finalised(shop: Project, early: bool) -> None:
    shop.write("shop/settings.py", WITH_PARTS)
    if early:
        _finalise_early(shop)
    tasks, schedule = json.loads(shop.python(SCHEDULE))
    passes = ["outbox.audit", "outbox.check_back", "outbox.compare", "outbox.conditions", "outbox.prune"]
    assert tasks == [*passes, *PASSES_OF_PARTS]
    assert schedule == {
        "outbox.check_back": {"task": "outbox.check_back", "schedule": 0.5},
        "outbox.compare": {"task": "outbox.compare", "schedule": 60.0},
        "outbox.conditions": {"task": "outbox.conditions", "schedule": 15.0},
        "outbox.prune": {"task": "outbox.prune", "schedule": 600.0},
        "outbox.audit": {"task": "outbox.audit", "schedule": 3600.0},
        **{name: {"task": name, "schedule": 60.0} for name in PASSES_OF_PARTS},
    }


@pytest.mark.slow
@pytest.mark.parametrize("shop", ["sqlalchemy"], indirect=True)
def test_beat_alone_drives_check_back(shop: Project) -> None:
    """No worker of this service has `--outbox`, and none has `-Q`."""
    lose_an_end(shop)
    _, log = shop.worker("--beat", f"--schedule={shop.folder / 'beat'}")
    eventually(lambda: shop.deciders() == {"K": 2}, within_seconds=60, what=log.read_text)


@pytest.mark.slow
def test_entries_survive_the_database_scheduler(shop: Project) -> None:
    """It keeps its own form of a schedule; the fields that it drops must not be needed."""
    pytest.importorskip("django_celery_beat", reason="django-celery-beat is not installed")
    shop.write("shop/settings.py", f"{WITH_PARTS}INSTALLED_APPS += ['django_celery_beat']\n")
    said = shop.python(
        """
        import json
        from django.core.management import call_command
        from shop.celery import app
        call_command("migrate", "django_celery_beat", verbosity=0)
        from django_celery_beat.schedulers import DatabaseScheduler
        app.finalize()
        entries = DatabaseScheduler(app=app).schedule
        sent = {
            name: [e.task, e.schedule.run_every.total_seconds(), e.options.get("queue"), e.options.get("expires")]
            for name, e in entries.items() if name.startswith("outbox.")
        }
        print(json.dumps(sent))
        """
    )
    assert json.loads(said) == {
        "outbox.check_back": ["outbox.check_back", 0.5, None, None],
        "outbox.compare": ["outbox.compare", 60, None, None],
        "outbox.conditions": ["outbox.conditions", 15, None, None],
        "outbox.prune": ["outbox.prune", 600, None, None],
        "outbox.audit": ["outbox.audit", 3600, None, None],
        **{name: [name, 60, None, None] for name in PASSES_OF_PARTS},
    }


@pytest.mark.slow
def test_a_pass_of_two_drivers_is_done_once(shop: Project) -> None:
    """A worker's own and that of beat: the second finds that it is not its turn."""
    said = shop.python(
        """
        from outbox.contrib.django.worker.periodic import passes
        from shop.celery import app
        settings.OUTBOX["CHECK_INTERVAL_SECONDS"] = 60.0
        app.finalize()
        first, second = passes()[0].run(), app.tasks["outbox.check_back"].run()
        print("claimed" in first, second)
        """.replace("settings.OUTBOX", "from django.conf import settings; settings.OUTBOX")
    )
    assert said.splitlines()[-1].startswith("True {'left_to': 'another process")
