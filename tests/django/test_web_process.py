"""A web process that registers handlers and publishes imports no code that only workers, commands and pages run.

All of this code together costs a web process more than 3 MB.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.django.processes import ROOT, environment

# Packages stand for all of their modules.
UNNEEDED = (
    "celery",
    "opentelemetry",
    "outbox.broker.consumer",
    "outbox.broker.leading",
    "outbox.broker.maintenance",
    "outbox.broker.operations.audit",
    "outbox.broker.operations.broker_conditions",
    "outbox.broker.operations.changes",
    "outbox.broker.operations.comparisons",
    "outbox.broker.operations.rules",
    "outbox.broker.operations.state",
    "outbox.broker.operations.summary",
    "outbox.broker.operations.trace",
    "outbox.broker.sequencer",
    "outbox.contrib.django.engine.memory",
    "outbox.contrib.rocketmq.engine",
    "outbox.contrib.django.ledger.pruning",
    "outbox.contrib.django.operations.checks",
    "outbox.contrib.django.operations.comparing",
    "outbox.contrib.django.operations.installation",
    "outbox.contrib.django.operations.watching",
    "outbox.contrib.saga.steps",
    "outbox.contrib.django.subscribers.inbox",
    "outbox.contrib.django.worker",
    "outbox.filters.parser",
    "outbox.memory",
    "outbox.rocketmq",
    "prometheus_client",
)
PUBLISHING = """
import sys, django
django.setup()
from django.db import transaction
from outbox.contrib.django import publish, subscriber

@subscriber("orders", group="web", tag="paid")
def handler(delivery):
    pass

for alias in "default", "broker":
    with transaction.atomic(using=alias):
        publish("orders", {}, using=alias)
print(*sys.modules)
"""


@pytest.mark.usefixtures("empty_log")
def test_a_process_that_publishes_imports_no_code_of_workers_and_operators() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PUBLISHING], env=environment(), cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    imported = done.stdout.split()
    # Both paths have been used.
    assert {"outbox.broker.postgres", "outbox.contrib.django.ledger.ledger"} <= set(imported)
    assert [name for name in imported if any(f"{name}.".startswith(f"{one}.") for one in UNNEEDED)] == []


@pytest.mark.whole
def test_every_named_module_exists() -> None:
    assert [name for name in UNNEEDED if importlib.util.find_spec(name) is None] == []


BEFORE_DJANGO = """
import importlib, os, sys
for module in ("celery", "worker.child", "worker.workers", "worker.periodic"):
    # Each in a process of its own: one must not import what the next one needs.
    if os.fork() == 0:
        made = importlib.import_module(f"outbox.contrib.django.{module}")
        names = [one.name for one in made.passes()] if module == "worker.periodic" else []
        from django.apps import apps
        print(module, apps.ready, *names, flush=True)
        os._exit(0)
    os.wait()
"""


def test_the_modules_that_start_processes_can_be_imported_before_django_is_set_up() -> None:
    """Celery's `-A` and `python -m` import them first, and then set Django up.

    A Celery app that is finalised early lists the passes while Django reads the settings.
    """
    command = [sys.executable, "-c", BEFORE_DJANGO]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment())
    *modules, passes = done.stdout.splitlines()
    assert modules == ["celery False", "worker.child False", "worker.workers False"], done.stderr
    assert passes.startswith("worker.periodic False ") and "conditions" in passes.split(), done.stderr
