"""The page's project and transactional tasks on real transports, with a real worker."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.celery.project import Project
from tests.servers import private_redis
from tests.support import eventually

PAID = ["invoice for A-1", "shipping A-1", "thanks for A-1"]
CANVAS = """
from celery import chain, chord, group
from django.db import transaction
from shop.tasks import add, note, send_invoice

with transaction.atomic():
    send_invoice.delay_on_commit("kept")
    chain(add.si(1, 1), add.s(10), note.s("chain")).delay()
    group(note.si(1, "group"), note.si(2, "group")).delay()
    note.apply_async((0, "own queue"), queue="special")
    with transaction.atomic():
        send_invoice.delay("kept, in a savepoint")
    try:
        with transaction.atomic():
            send_invoice.delay("undone")
            raise ValueError
    except ValueError:
        pass
"""
MORE_TASKS = """
@shared_task
def add(a, b):
    return a + b


@shared_task
def note(value, text):
    Mail.objects.create(text=f"{text} {value}")
"""
DONE = ["chain 12", "group 1", "group 2", "invoice for kept", "invoice for kept, in a savepoint", "own queue 0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "shop",
    [
        "sqlalchemy",
        pytest.param("redis", marks=pytest.mark.soak),
        "rabbitmq",
    ],
    indirect=True,
)
def test_tasks_of_a_transaction_on_every_transport(shop: Project) -> None:
    shop.write("shop/tasks.py", MORE_TASKS)
    _, log = shop.worker("--outbox", "--queues=celery,special")
    shop.python(CANVAS)
    eventually(lambda: len(shop.mails()) >= len(DONE), within_seconds=60, what=log.read_text)
    eventually(lambda: None not in shop.deciders(), what="a decision about each half, that of the savepoint too")
    assert shop.mails() == DONE


@pytest.mark.parametrize("shop", ["redis"], indirect=True)
@pytest.mark.parametrize("delay", ["delay", "outbox"])
@pytest.mark.slow
def test_a_process_that_dies_after_commit_loses_no_task(shop: Project, delay: str) -> None:
    """The control, Celery's own delay_on_commit, loses it at the same moment."""
    if delay == "delay":
        shop.write("shop/tasks.py", "from celery.contrib.django.task import DjangoTask\n")
        shop.write("shop/tasks.py", "plain_invoice = shared_task(base=DjangoTask, name='plain')(send_invoice.run)\n")
        call = "plain_invoice.delay_on_commit('A-1')"
    else:
        call = "send_invoice.delay_on_commit('A-1')"
    shop.python(
        f"""
        from django.db import transaction
        from outbox.contrib.django import publish
        from shop.tasks import *
        with transaction.atomic():
            publish("order.paid", {{"number": "A-1"}})
            {call}
        """,
        status=-signal.SIGKILL,
        OUTBOX_FAULTS="producer.after_local_commit=kill",
    )
    _, log = shop.worker("--outbox")
    expected = PAID if delay == "outbox" else [text for text in PAID if not text.startswith("invoice")]
    eventually(lambda: shop.mails() == expected, within_seconds=60, what=log.read_text)


@pytest.mark.slow
def test_a_broker_that_is_away_gets_the_task_later(shop: Project, tmp_path: Path) -> None:
    redis = private_redis(tmp_path)
    shop.transport = f"redis+socket://{redis.path}"
    shop.python("from shop.services import pay; pay('A-1')")
    process, log = shop.start("python", "manage.py", "outbox_worker")
    eventually(lambda: "Error" in log.read_text(), within_seconds=40, what=log.read_text)
    with redis:
        _, celery_log = shop.worker()
        eventually(lambda: shop.mails() == PAID, within_seconds=60, what=celery_log.read_text)
        os.killpg(process.pid, signal.SIGTERM)
        shop.stop()
