"""Every form in which a transactional task can be called: in a transaction that commits, and in one that rolls back."""

from __future__ import annotations

import json
from typing import Final

import pytest

from tests.celery.project import PAGE, Project

# The forms of docs/celery.md: a call of `invoice`, a transactional task, in some way.
FORMS: Final = {
    "delay": "invoice.delay('1')",
    "apply_async": "invoice.apply_async(('1',))",
    "apply_async(countdown=, eta=, expires=, headers=)": (
        "invoice.apply_async(('1',), countdown=60, expires=900, headers={'tenant': 'x'})"
    ),
    "apply_async(retries=)": "invoice.apply_async(('1',), retries=1)",
    "apply_async(task_id=)": "invoice.apply_async(('1',), task_id='an-id')",
    "apply_async(producer=)": "with_producer(lambda it: invoice.apply_async(('1',), producer=it))",
    "apply_async(publisher=)": "with_producer(lambda it: invoice.apply_async(('1',), publisher=it))",
    "apply_async(link=, link_error=)": (
        "invoice.apply_async(('1',), link=invoice.si('2'), link_error=invoice.si('3'))"
    ),
    "delay_on_commit": "invoice.delay_on_commit('1')",
    "apply_async_on_commit": "invoice.apply_async_on_commit(('1',))",
    "s().delay": "invoice.s('1').delay()",
    "s().apply_async": "invoice.s('1').apply_async()",
    "si().set().apply_async": "invoice.si('1').set(countdown=1).apply_async()",
    "signature": "signature('shop.tasks.invoice', args=('1',)).delay()",
    "app.signature": "app.signature('shop.tasks.invoice', args=('1',)).apply_async()",
    "app.tasks[]": "app.tasks['shop.tasks.invoice'].delay('1')",
    "app.send_task": "app.send_task('shop.tasks.invoice', ('1',))",
    "app.send_task(name, args, kwargs, countdown, …)": (
        "app.send_task('shop.tasks.invoice', ('1',), {}, 60, None, 'an-id')"
    ),
    "map": "invoice.map(['1', '2']).delay()",
    "starmap": "invoice.starmap([('1',), ('2',)]).apply_async()",
    "chunks": "invoice.chunks([('1',), ('2',)], 1).apply_async()",
    "chunks()": "invoice.chunks([('1',), ('2',)], 1)()",
    "chunks().group": "invoice.chunks([('1',), ('2',)], 1).group().delay()",
    "group": "group(invoice.si('1'), invoice.si('2')).apply_async()",
    "group(task.map())": "group(invoice.map(['1']), invoice.si('2')).delay()",
    "chain": "chain(invoice.si('1'), invoice.si('2')).delay()",
    "task.s() \\| task.s()": "(invoice.si('1') | invoice.si('2')).apply_async()",
    "chain(ordinary.s(), task.s())": "chain(ordinary.si('1'), invoice.si('2')).delay()",
    "ordinary.apply_async(link=task.s())": "ordinary.apply_async(('1',), link=invoice.si('2'))",
    "ordinary.apply_async(link_error=task.s())": "ordinary.apply_async(('1',), link_error=[invoice.si('2')])",
}
# Each with what its error names.
REFUSED: Final = {
    "apply_async(connection=)": (
        "with_connection(lambda it: invoice.apply_async(('1',), connection=it))",
        "connection=",
    ),
    "app.send_task(connection=)": (
        "with_connection(lambda it: app.send_task('shop.tasks.invoice', ('1',), connection=it))",
        "connection=",
    ),
}
# Calls that do not join: they run here, or belong to an ordinary task.
RUN_HERE: Final = {"apply": "invoice.apply(('1',))", "call": "invoice('1')"}
ORDINARY: Final = {
    "an ordinary task": "ordinary.delay('1')",
    "the name of another service's task": "app.send_task('elsewhere.task', ('1',))",
}

CALLS = """
import json
from celery import chain, chord, group, signature
from django.db import transaction
from outbox.contrib.django.worker.drain import drain
from shop.celery import app

def with_producer(call):
    with app.producer_or_acquire() as producer:
        return call(producer)

def with_connection(call):
    with app.connection_for_write() as connection:
        return call(connection)

def sent():
    with app.connection_for_read() as connection:
        channel, found = connection.default_channel, []
        while (message := channel.basic_get("celery", no_ack=True)) is not None:
            found.append(message.headers["task"])
        return found

class Undone(Exception):
    pass

def outcome(form):
    # What went to Celery's broker within the block, after a rollback, and after a commit and its hand-over.
    exec({names!r}, globals())
    try:
        with transaction.atomic():
            eval(form)
            within = sent()
            raise Undone
    except Undone:
        pass
    except Exception as error:
        return ["refused", type(error).__name__, str(error)]
    drain()
    undone = sent()
    with transaction.atomic():
        eval(form)
    at_once = sent()
    drain()
    return [within, undone, at_once, len(sent())]

for form in {forms}:
    print(json.dumps(outcome(form)))
"""

TASKS = """
@shared_task({base})
def invoice(number):
    pass


@shared_task(base=celery.Task)
def ordinary(number):
    pass
"""


@pytest.fixture(params=["task_cls", "base"])
def forms(shop: Project, request: pytest.FixtureRequest) -> Project:
    """The project of the page; or one in which a single task is transactional."""
    app, tasks = (shop.folder / "shop" / name for name in ("celery.py", "tasks.py"))
    base = ""
    if request.param == "base":
        app.write_text(app.read_text().replace(', task_cls="outbox.contrib.django.celery:TransactionalTask"', ""))
        base = "base=TransactionalTask"
    tasks.write_text(
        "import celery\nfrom outbox.contrib.django.celery import TransactionalTask\n"
        + tasks.read_text()
        + TASKS.replace("{base}", base)
    )
    shop.write("shop/settings.py", "CELERY_RESULT_BACKEND = 'cache+memory://'\n")
    return shop


def _run(
    project: Project, forms: list[str], *, names: str = "from shop.tasks import invoice, ordinary"
) -> list[list[object]]:
    said = project.python(CALLS.replace("{names!r}", repr(names)).replace("{forms}", repr(forms)))
    return [json.loads(line) for line in said.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_form_joins_its_transaction_or_is_refused(forms: Project, request: pytest.FixtureRequest) -> None:
    calls = [*FORMS.values(), *(form for form, _ in REFUSED.values()), *RUN_HERE.values(), *ORDINARY.values()]
    found = iter(_run(forms, calls))
    joined = {name: next(found) for name in FORMS}
    assert {name: what for name, what in joined.items() if what[:3] != [[], [], []] or not what[3]} == {}
    for name, (_, named) in REFUSED.items():
        refused, error, text = next(found)
        assert (refused, error) == ("refused", "UsageError"), name
        assert named in str(text) and "shop.tasks.invoice" in str(text), text
    assert [next(found) for _ in RUN_HERE] == [[[], [], [], 0]] * len(RUN_HERE)
    assert next(found) == [["shop.tasks.ordinary"], [], ["shop.tasks.ordinary"], 0]
    if "task_cls" in request.node.name:
        assert next(found) == [[], [], [], 1], "all that this app sends joins"
    else:
        assert next(found) == [["elsewhere.task"], [], ["elsewhere.task"], 0]


def test_the_page_lists_every_form() -> None:
    page = PAGE.read_text()
    assert [name for name in [*FORMS, *REFUSED] if f"`{name}`" not in page] == []


@pytest.mark.slow
def test_a_name_is_known_before_its_module_is_imported(forms: Project) -> None:
    """A web process that imports no tasks, and no task of which was called before."""
    [found] = _run(forms, [FORMS["app.send_task"]], names="pass")
    assert found == [[], [], [], 1]
