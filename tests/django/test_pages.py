"""The examples of the pages for application developers run as they are written, on a broker in PostgreSQL.

The blocks of a page share one namespace, and messages are handled after each block. `OUTBOX` of a block replaces the
settings from there on. The blocks of docs/testing.md are files of a project, which pytest runs.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.conf import settings as django_settings
from django.core import mail
from django.core.management import call_command
from django.db import connection, transaction
from django.test.utils import override_settings

from outbox import Delivery
from outbox.contrib.django import publish, subscriber, transactional_message
from outbox.contrib.django.operations.installation import install_broker
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.subscribers.registry import subscriptions
from outbox.contrib.django.testing import in_memory_outbox
from outbox.contrib.django.worker.drain import drain
from outbox.events import declaration
from tests.django import configured
from tests.django.pages import models
from tests.django.processes import ROOT, environment
from tests.part_apps import has

DOCS = ROOT / "docs"
BLOCKS = re.compile(r"^```(python|sh|sql)\n(.*?)^```", re.DOTALL | re.MULTILINE)
TOPICS: dict[str, Any] = {
    "order.paid": {},
    "order.placed": {},
    "order.placed.v2": {},
    "order-paid": {"types": ["NORMAL", "DELAY", "TRANSACTION"]},
    "scans": {},
    "points.earned": {"types": ["NORMAL", "TRANSACTION"]},
    "order.step": {"types": ["FIFO", "TRANSACTION"]},
    "order.reminder": {"types": ["NORMAL", "DELAY", "TRANSACTION"]},
    "login.code": {"types": ["NORMAL", "TRANSACTION"]},
    "invoice.requested": {},
    "orders": {"types": ["NORMAL", "TRANSACTION"]},
    "payments": {},
    "nightly-report": {"queue_count": 1},
}


def blocks(page: str, after: str = "", before: str = "") -> list[tuple[str, str]]:
    """(language, text) of the examples of a page that run, all or those between two headings (##)."""
    text = (DOCS / page).read_text(encoding="utf-8")
    text = text.split(f"\n## {after}\n", 1)[1] if after else text
    text = text.split(f"\n## {before}", 1)[0] if before else text
    return [(found[1], found[2]) for found in BLOCKS.finditer(text)]


@pytest.fixture
def shop(databases: None, no_subscribers: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The models of the documents, as `shop.models`."""
    package = ModuleType("shop")
    monkeypatch.setitem(sys.modules, "shop", package)
    monkeypatch.setitem(sys.modules, "shop.models", models)
    yield
    for model in (models.Order, models.Shipment, models.Points, models.Step, models.Mail, models.Report):
        model._default_manager.all().delete()


class Page:
    """A page whose blocks run one after the other."""

    def __init__(self, change: Callable[..., None], **names: Any) -> None:
        self._change = change
        self.names = names
        self.read_again(TOPICS)

    def read_again(self, topics: Mapping[str, Any], **keys: Any) -> None:
        self._change(TOPICS={**TOPICS, **topics}, **keys)
        install_broker(get_settings())

    def run(self, page: str, after: str = "", before: str = "") -> None:
        for language, text in blocks(page, after, before):
            if text.startswith("# before: "):
                continue
            getattr(self, f"run_{language}")(text)
            if subscriptions():
                drain()

    def run_python(self, text: str) -> None:
        # As in the settings of a project: the dictionary of the block, beside the databases of these tests.
        exec(compile(text, "page", "exec"), self.names)
        given = self.names.pop("OUTBOX", {})
        if given:
            own = {name: value for name, value in given.items() if name not in ("BROKER", "PRODUCER_GROUP", "TOPICS")}
            self.read_again(given.get("TOPICS", {}), **own)

    def run_sh(self, text: str) -> None:
        for line in text.splitlines():
            program, name, *arguments = shlex.split(line, comments=True)
            assert program == "manage.py", line
            call_command(name, *arguments)

    def run_sql(self, text: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(text)


@pytest.fixture
def page(shop: None, outbox_settings: Callable[..., None]) -> Page:
    return Page(outbox_settings)


def paid(number: str = "1", **values: Any) -> models.Order:
    return models.Order.objects.create(number=number, status="paid", **values)


def test_publishing(page: Page) -> None:
    page.run("publishing.md", before="Failures")
    handled = record("order.step", "order.paid", "points.earned")
    assert async_to_sync(page.names["remind"])(7) is None
    drain()
    # The decorated class has a view that pays by its own transaction.
    assert [topic for topic, _ in handled].count("order.step") == 1
    assert ("points.earned", {"order_id": 7}) in handled and ("points.earned", {"points": 5}) in handled
    assert [body for topic, body in handled if topic == "points.earned"].count({"points": 12}) == 2
    assert [topic for topic, _ in handled].count("order.paid") == 3


def record(*topics: str) -> list[tuple[str, Any]]:
    """Handle the messages of the topics, and return the list to which each handled message is added."""
    handled: list[tuple[str, Any]] = []

    def note(delivery: Delivery) -> None:
        handled.append((delivery.topic, delivery.body))

    for topic in topics:
        subscriber(topic, group=f"record-{topic}", start="earliest")(note)
    return handled


def test_transactions(page: Page) -> None:
    page.run("publishing.md", after="Failures", before="Publish from SQL")
    handled = record("order.paid")
    drain()
    order = models.Order.objects.get()
    assert (order.number, order.status) == ("A-1", "paid")
    assert handled == [("order.paid", {"order_id": order.pk})] * 3


def test_handlers(page: Page) -> None:
    page.run("handlers.md", before="When a handler fails")
    publish("order.paid", {"order_id": 3}, at_once=True)
    publish("points.earned", {"points": 4}, at_once=True)
    drain()
    assert models.Shipment.objects.get().order_id == 3
    assert sorted(models.Points.objects.values_list("order_id", "points")) == [(0, 4), (3, 0)]


def test_large_bodies(page: Page, tmp_path: Path) -> None:
    backend = {"BACKEND": "django.core.files.storage.FileSystemStorage", "OPTIONS": {"location": str(tmp_path)}}
    with override_settings(STORAGES={**django_settings.STORAGES, "bodies": backend}):
        page.run("large-bodies.md")
    texts = [
        f"{key}: {hashlib.sha256(json.dumps(body, ensure_ascii=False, separators=(',', ':')).encode()).hexdigest()}"
        for key, body in ((number, {"order_id": number, "scan": "…" * 200_000}) for number in (7, 8))
    ]
    assert sorted(models.Mail.objects.values_list("text", flat=True)) == texts


def test_failures(page: Page) -> None:
    for body in ({"points": 1}, {"points": -1}, {"points": 2000}, {}):
        publish("points.earned", body, at_once=True)
    page.run("handlers.md", after="When a handler fails")
    assert models.Points.objects.count() == 1


def test_order_and_delay(page: Page) -> None:
    page.run("order-and-delay.md", before="Dead letters that keep the order")
    assert models.Step.objects.get().step == "placed"


@pytest.mark.parametrize("path", ["atomic"], indirect=True)
def test_sql(path: str, shop: None, outbox_settings: Callable[..., None]) -> None:
    outbox_settings(BROKER="default")
    page = Page(outbox_settings)
    with connection.cursor() as cursor:
        cursor.execute("CREATE ROLE shop")
    try:
        page.run("publishing.md", after="Publish from SQL")
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO shop_order (number, status) VALUES ('A-3', 'paid')")
        handled = record("order-paid")
        drain()
        assert sorted(body["number"] for _, body in handled) == ["A-2", "A-3"]
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP FUNCTION IF EXISTS announce_order CASCADE; DROP OWNED BY shop; DROP ROLE shop")


def test_unique_messages(page: Page) -> None:
    page.run("unique-messages.md")
    order = paid()
    assert page.names["request_invoice"](order) and not page.names["request_invoice"](order)


def test_limits(page: Page) -> None:
    page.run("limits.md")
    publish("order.paid", {}, key="1", at_once=True)
    drain()
    assert models.Mail.objects.get().text == "order 1"


@pytest.mark.skipif(not has("fair_share"), reason="needs the part")
def test_fair_share(page: Page) -> None:
    page.run("fair-share.md")
    publish("order.paid", {}, key="1", headers={"tenant": "acme"}, at_once=True)
    drain()
    assert models.Mail.objects.get().text == "order 1"


class Provider:
    """The payment provider and the bank of docs/slow-calls.md."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.receipts: list[str] = []

    def charge(self, amount: int, key: str) -> dict[str, str]:
        self.calls.append((amount, key))
        return {"id": "p-1"}

    def transfer(self, amount: int) -> None:
        self.calls.append((amount,))

    def send_receipt(self, order: str, key: str) -> None:
        self.receipts.append(order)


def test_slow_calls(page: Page) -> None:
    page.names["provider"] = page.names["bank"] = provider = Provider()
    page.run("slow-calls.md")
    paid("A-1", amount=12)
    publish("orders", {}, key="A-1", at_once=True)
    drain()
    assert models.Order.objects.get().payment == "p-1"
    assert sorted(map(len, provider.calls)) == [1, 2]
    assert provider.receipts == ["A-1"]


def test_schedules(page: Page) -> None:
    shown = [text for language, text in blocks("schedules.md") if language == "python"]
    for text in shown[:-1]:
        page.run_python(text)
    with in_memory_outbox() as outbox:
        page.run_python(shown[-1])
        page.names["test_nightly_report"](outbox)


def test_changing_messages(page: Page) -> None:
    page.run("changing-messages.md")


@pytest.mark.parametrize("name", ["index.md", "../README.md"])
def test_the_first_example(page: Page, name: str) -> None:
    page.names |= {"transactional_message": transactional_message, "subscriber": subscriber}
    page.names |= {"Shipment": models.Shipment}
    page.names |= {"transaction": transaction, "publish": publish}
    # README shows the code that loses a message first.
    *_, text = (text for language, text in blocks(name) if language == "python")
    page.run_python(text)
    order = paid()
    page.names["pay"](order)
    drain()
    assert models.Shipment.objects.get().order_id == order.pk


def test_events(page: Page, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Python evaluates the annotations of a dataclass in its module.
    module = ModuleType("shop.events")
    monkeypatch.setitem(sys.modules, "shop.events", module)
    page.names = module.__dict__
    with declaration.restored():
        page.names |= {"Points": models.Points, "Mail": models.Mail, "Shipment": models.Shipment}
        page.run("events.md")
        assert models.Points.objects.get().points == 12
        assert sorted(models.Mail.objects.values_list("text", flat=True)) == ["12.50 EUR", "90 SEK"]
        assert sorted(models.Shipment.objects.values_list("order_id", flat=True)) == [7, 8]
    [schemas] = _json_values(capsys.readouterr().out)
    assert [one["$id"] for one in schemas if "order.paid" in one["$id"]] == [
        "urn:event:order.paid:1",
        "urn:event:order.paid:2",
    ]


def _json_values(text: str) -> list[Any]:
    """The JSON values in a text, one after the other."""
    found: list[Any] = []
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        found.append(value)
        at += len(text[at:]) - len(text[at:].lstrip())
    return found


def test_settings(page: Page) -> None:
    page.run("settings.md")
    assert get_settings().topics["order.step"].topic.types


def test_on_commit(page: Page) -> None:
    page.run("migration.md", after="From on_commit", before="From Celery")
    assert models.Shipment.objects.get().order_id == models.Order.objects.get().pk
    assert [one.body for one in mail.outbox] == ["A-1"]


def test_procrastinate(page: Page) -> None:
    page.run("migration.md", after="From procrastinate", before="From django-outbox-pattern")
    assert models.Shipment.objects.get().order_id == models.Order.objects.get().pk


def test_django_outbox_pattern(page: Page) -> None:
    page.run("migration.md", after="From django-outbox-pattern")
    page.names["place"]("")
    drain()
    assert models.Shipment.objects.get().order_id == models.Order.objects.get(number="A-1").pk


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_testing(databases: None, tmp_path: Path) -> None:
    files = dict(re.findall(r"```python\n# (shop/\w+\.py)\n(.*?)```", (DOCS / "testing.md").read_text(), re.DOTALL))
    assert len(files) == len(blocks("testing.md", before="Crash tests")) == 5
    (tmp_path / "shop").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\npython_files = test*.py\n")
    files |= {
        "shop/__init__.py": "",
        "shop/apps.py": "from django.apps import AppConfig\nclass Config(AppConfig): name, label = 'shop', 'tested'\n",
        "shop/models.py": "from tests.django.pages.models import *",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    topics = {name: TOPICS[name] for name in ("order.paid", "order.reminder")}
    given = environment(outbox={"TOPICS": {**configured.OUTBOX["TOPICS"], **topics}})
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--noconftest", "-c", "pytest.ini"]
    done = subprocess.run(
        [*command, "shop"],
        cwd=tmp_path,
        env={**given, "TEST_APPS": "tests.django.pages shop", "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0 and "5 passed" in done.stdout, done.stdout + done.stderr
