"""Transactional tasks: which calls are stored, and which are not."""

from __future__ import annotations

import json
from typing import Any

from tests.celery.project import Project

# Messages of both ways out of the same memory transport, in one process.
HANDED_OVER = """
import datetime, json
from celery import signature
from django.db import transaction
from outbox.contrib.django.worker.drain import drain
from shop.celery import app
from shop.tasks import send_invoice

options = dict(
    task_id="0123", eta=datetime.datetime(2099, 1, 1, tzinfo=datetime.timezone.utc), queue="special", priority=3,
    headers={"tenant": "x"}, ignore_result=True, link=[signature("after", args=(1,))], expires=4e9, shadow="shadow",
    time_limit=9, correlation_id="0123", reply_to="nobody",
)

def taken():
    with app.connection_for_read() as connection:
        message = connection.default_channel.basic_get("special", no_ack=True)
    assert message is not None
    properties = {k: v for k, v in message.properties.items() if not k.startswith("delivery_")}
    assert abs(float(properties.pop("expiration")) - 4e12) < 1e6
    return [message.body.decode() if isinstance(message.body, bytes) else message.body, message.headers,
            message.content_type, message.content_encoding, properties,
            message.delivery_info, message.properties["delivery_mode"]]

send_invoice.apply_async(("A-1",), **options)
plain = taken()
with transaction.atomic():
    result = send_invoice.apply_async(("A-1",), **options)
drain()
print(json.dumps([result.id, plain, taken()], default=str))
"""


def test_what_is_handed_over_is_what_celery_would_have_sent(shop: Project) -> None:
    task_id, plain, stored = json.loads(shop.python(HANDED_OVER))
    assert task_id == "0123"
    for message in (plain, stored):
        # The moment of the call, as text: both have one, of their own.
        assert message[1].pop("expires")
    assert stored == plain
    assert (plain[1]["ignore_result"], plain[1]["tenant"], plain[1]["eta"][:4]) == (True, "x", "2099")


def _stored(shop: Project) -> list[tuple[Any, ...]]:
    return shop.rows("SELECT tag FROM outbox.commit_log ORDER BY log_id", outbox=True)


def test_outside_of_a_transaction_a_task_is_sent_at_once(shop: Project) -> None:
    """An eager one runs at once; one in two transactions is refused, and the error names the next step."""
    said = shop.python(
        """
        from django.db import transaction
        from shop.celery import app
        from shop.models import Mail
        from shop.tasks import send_invoice

        send_invoice.delay("sent")
        with app.connection_for_read() as connection:
            assert connection.default_channel.basic_get("celery", no_ack=True)
        app.conf.task_always_eager = True
        with transaction.atomic():
            send_invoice.delay("eager")
            print(Mail.objects.get().text)

        app.conf.task_always_eager = False
        from outbox.errors import TransactionUsageError

        with transaction.atomic(), transaction.atomic(using="broker"):
            try:
                send_invoice.delay("1")
            except TransactionUsageError as error:
                print(error)
            send_invoice.using = "default"
            send_invoice.delay("2")
        """
    )
    eager, error = said.splitlines()
    assert eager == "invoice for eager"
    assert error.startswith("the call of the task shop.tasks.send_invoice is stored with the open transaction")
    assert "@shared_task(using='default')" in error
    assert _stored(shop) == [("shop.tasks.send_invoice",)]


def test_a_name_that_cannot_be_a_tag_is_left_out(shop: Project) -> None:
    """Celery takes any text as the name of a task."""
    names = ["send mail", "a|b", "n" * 128]
    shop.write("shop/tasks.py", "".join(f"\nshared_task(name={name!r})(send_invoice.run)\n" for name in names))
    shop.python(
        f"""
        from django.db import transaction
        from shop.celery import app

        with transaction.atomic():
            for name in {names!r}:
                app.send_task(name, ("A-1",))
        """
    )
    assert _stored(shop) == [("",)] * 3


def test_a_retry_is_not_rolled_back_with_its_block(shop: Project) -> None:
    # A group that replaces a task becomes a chord, which needs one.
    shop.write("shop/settings.py", "CELERY_RESULT_BACKEND = 'cache+memory://'\n")
    shop.write(
        "shop/tasks.py",
        """
        from django.db import transaction


        @shared_task(bind=True)
        def tries(self):
            with transaction.atomic():
                raise self.retry(countdown=1)


        @shared_task(bind=True)
        def replaced(self):
            with transaction.atomic():
                self.replace(send_invoice.si("replaced"))


        @shared_task(bind=True)
        def replaced_by_many(self):
            from celery import group
            with transaction.atomic():
                self.replace(group(send_invoice.si("one"), send_invoice.si("two")))
        """,
    )
    shop.python(
        """
        from celery.exceptions import Ignore, Retry
        from shop.celery import app
        from shop.tasks import replaced, replaced_by_many, tries

        for task, error in ((tries, Retry), (replaced, Ignore), (replaced_by_many, Ignore)):
            task.push_request(id=task.name, args=(), kwargs={}, called_directly=False, delivery_info={}, is_eager=False)
            from celery._state import _task_stack
            _task_stack.push(task)
            try:
                task.run()
            except error:
                pass
            _task_stack.pop()
            task.pop_request()
            with app.connection_for_read() as connection:
                message = connection.default_channel.basic_get("celery", no_ack=True)
            assert message is not None, task
            assert task is replaced_by_many or message.headers["id"] == task.name, task
        """
    )
    assert _stored(shop) == []


def test_a_chord_that_would_be_polled_for_ever_is_refused(shop: Project) -> None:
    """The transaction is rolled back, also if the caller catches the error."""
    app = shop.folder / "shop" / "celery.py"
    text = app.read_text()
    assert "task_cls=" in text
    call = """
        from celery import chord
        from django.db import transaction
        from shop.models import Order
        from shop.tasks import send_invoice

        with transaction.atomic():
            Order.objects.create(number="1")
            try:
                chord([send_invoice.si("a"), send_invoice.si("b")], send_invoice.si("c")).delay()
                print("stored")
            except Exception as error:
                print(type(error).__name__, error)
        """
    shop.write("shop/settings.py", f"CELERY_RESULT_BACKEND = 'file://{shop.folder}'\n")
    assert shop.python(call) == "stored\n"
    assert ("celery.chord_unlock",) in _stored(shop)
    app.write_text(text.replace(', task_cls="outbox.contrib.django.celery:TransactionalTask"', ""))
    tasks = shop.folder / "shop" / "tasks.py"
    tasks.write_text(
        tasks.read_text()
        .replace("@shared_task\ndef send_invoice", "@shared_task(base=TransactionalTask)\ndef send_invoice")
        .replace("import subscriber_task", "import TransactionalTask, subscriber_task")
    )
    said = shop.python(call)
    assert said.startswith("UsageError the chord of shop.tasks.send_invoice cannot wait for its transaction")
    assert len(shop.rows("SELECT * FROM shop_order")) == 1


def test_without_the_app_a_call_in_a_transaction_is_refused(shop: Project) -> None:
    shop.write("shop/settings.py", "del OUTBOX['CELERY_APP']\n")
    said = shop.python(
        """
        from outbox.errors import ConfigurationError
        from shop.services import pay
        try:
            pay("A-1")
        except ConfigurationError as error:
            print(error)
        """
    )
    assert "the task shop.tasks.send_invoice is called in a transaction, but OUTBOX['CELERY_APP'] is not set" in said
    assert shop.rows("SELECT * FROM shop_order") == []
